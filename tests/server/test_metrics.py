"""The metrics page for Prometheus."""

import os
from contextlib import closing

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.front.metrics import (
    LATENCY_BOUNDS,
    TOKEN_BOUNDS,
    TTFT_BOUNDS,
    StepMetrics,
    token_buckets,
)
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import RequestOutput, StepOutputs, StepStats
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.metrics import ENGINE_METRICS, render
from server.state import ServerState

PROMPT = {"prompt": [1] * 20, "max_tokens": 2}


def parse(page: str) -> dict[str, dict[tuple, float]]:
    """Returns the values of the samples by name and by the labels that are not common to all."""
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            key = tuple(sorted(labels.items()))
            values = found.setdefault(sample.name, {})
            assert key not in values, "a sample appears twice"
            values[key] = sample.value
    return found


async def test_the_page_counts_requests_and_tokens(make_client, text_engine) -> None:
    async with make_client() as client:
        for _ in range(3):
            await client.post("/v1/completions", json=PROMPT)
        await client.post("/v1/completions", json=PROMPT | {"n": 0})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    page = parse(response.text)
    assert page["vllm:request_success_total"][(("finished_reason", "length"),)] == 3
    assert page["vllm:request_success_total"][(("finished_reason", "stop"),)] == 0
    assert page["vllm:prompt_tokens_total"][()] == 60
    assert page["vllm:generation_tokens_total"][()] == 6
    assert page["vllm:time_to_first_token_seconds_count"][()] == 3
    assert page["vllm:inter_token_latency_seconds_count"][()] == 3
    assert page["vllm:request_prompt_tokens_sum"][()] == 60
    sizes = (("block_size", "16"), ("num_gpu_blocks", "65"))
    assert page["vllm:cache_config_info"][sizes] == 1
    assert page["vllm:num_requests_running"][()] == 0


async def test_the_page_has_no_metrics_of_a_prefix_cache(make_client) -> None:
    async with make_client() as client:
        page = parse((await client.get("/metrics")).text)
        info = (await client.get("/server_info")).json()
    assert not [name for name in page if "prefix_cache" in name or "tokens_cached" in name]
    assert not [name for name in info["engines"]["0"] if name.startswith("prefix_")]


def bounds(page: dict[str, dict[tuple, float]], name: str) -> list[float]:
    values = {float(dict(key)["le"]): v for key, v in page[f"vllm:{name}_bucket"].items()}
    assert list(values.values()) == sorted(values.values()), "buckets are cumulative"
    assert values[float("inf")] == page[f"vllm:{name}_count"][()]
    return sorted(values)[:-1]


def test_histograms_have_the_buckets_that_dashboards_expect() -> None:
    page = parse(render(scripted_text_engine("he"), prefix="vllm"))
    assert bounds(page, "time_to_first_token_seconds") == list(TTFT_BOUNDS)
    assert len(TTFT_BOUNDS) == 22
    assert bounds(page, "inter_token_latency_seconds") == list(TOKEN_BOUNDS)
    assert bounds(page, "request_time_per_output_token_seconds") == list(TOKEN_BOUNDS)
    for kind in ("e2e_request_latency", *(f"request_{w}_time" for w in ("queue", "prefill"))):
        assert bounds(page, f"{kind}_seconds") == list(LATENCY_BOUNDS)
    assert bounds(page, "request_params_n") == [1, 2, 5, 10, 20]
    assert bounds(page, "request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200]
    assert token_buckets(1000)[-2:] == (500, 1000)


def test_steps_are_counted_once_and_heartbeats_are_not() -> None:
    text_engine = scripted_text_engine("he")
    steps = StepMetrics(text_engine.counts.own)
    for total, tokens in ((1, 30), (2, 1), (2, 1), (2, 0)):
        stats = StepStats(total_steps=total, num_step_tokens=tokens)
        steps.step_done(StepOutputs(0, [RequestOutput("a", [1])], stats))
    page = parse(render(text_engine, prefix="vllm"))
    assert page["vllm:iteration_tokens_total_count"][()] == 2
    assert page["vllm:iteration_tokens_total_sum"][()] == 31
    assert bounds(page, "iteration_tokens_total") == [1, *(2**i for i in range(3, 15))]


async def test_the_pages_of_all_fronts_are_the_same_and_count_all_requests() -> None:
    sizes = {"num_fronts": 2, "num_engines": 1}
    with closing(SharedCounts.create(**sizes)) as main:
        StepMetrics(main.own).step_done(
            StepOutputs(0, [], StepStats(total_steps=1, num_step_tokens=30))
        )
        pages, loads = [], []
        engines = [
            scripted_text_engine(
                "hello world", counts=SharedCounts.attach(os.dup(main.fileno()), index=i, **sizes)
            )
            for i in range(2)
        ]
        for text_engine, times in zip(engines, (1, 2), strict=True):
            async with client_of(text_engine) as client:
                for _ in range(times):
                    assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        with engines[0].admit(3, 1), engines[1].admit(2, 2):
            for text_engine in engines:
                async with client_of(text_engine) as client:
                    pages.append((await client.get("/metrics")).text)
                    loads.append((await client.get("/load")).json())
                    loads.append(
                        {"server_load": (await client.get("/server_info")).json()["server_load"]}
                    )
    assert loads == [{"server_load": 7}] * 4
    assert pages[0] == pages[1]
    page = parse(pages[0])
    assert page["vllm:request_success_total"][(("finished_reason", "length"),)] == 3
    assert page["vllm:prompt_tokens_total"][()] == 60
    assert page["vllm:generation_tokens_total"][()] == 6
    assert page["vllm:inter_token_latency_seconds_count"][()] == 3
    assert page["vllm:iteration_tokens_total_sum"][()] == 30


def client_of(text_engine: TextEngine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(ServerState(text_engine)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def test_requests_with_numbers_that_are_not_finite_are_counted() -> None:
    text_engine = scripted_text_engine("he")
    text_engine.engine.base_stats = StepStats(total_corrupted=3)
    page = parse(render(text_engine, prefix="vllm"))
    assert page["vllm:corrupted_requests_total"][()] == 3


def test_each_engine_has_its_own_samples(monkeypatch) -> None:
    text_engine = scripted_text_engine("he", names=('a"\\b',))
    stats = {0: StepStats(num_running=2), 1: StepStats(num_running=5, total_preemptions=7)}
    monkeypatch.setattr(type(text_engine.engine), "stats", stats)
    page = render(text_engine, prefix="jaxserve")
    by_engine = {
        (s.name, s.labels["engine"]): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name.removeprefix("jaxserve:") in ENGINE_METRICS
    }
    assert by_engine["jaxserve:num_requests_running", "0"] == 2
    assert by_engine["jaxserve:num_requests_running", "1"] == 5
    assert by_engine["jaxserve:num_preemptions_total", "1"] == 7
    assert 'engine="all"' in page
    (running, *_) = text_string_to_metric_families(page)
    assert running.samples[0].labels["model_name"] == 'a"\\b'


def test_an_engine_that_speculates_counts_its_drafts() -> None:
    text_engine = scripted_text_engine("he")
    assert "spec_decode" not in render(text_engine, prefix="vllm")
    text_engine.engine.base_stats = StepStats(
        total_drafts=5, total_draft_tokens=14, accepted_per_position=(4, 2, 0)
    )
    page = parse(render(text_engine, prefix="vllm"))
    assert page["vllm:spec_decode_num_drafts_total"][()] == 5
    assert page["vllm:spec_decode_num_draft_tokens_total"][()] == 14
    assert page["vllm:spec_decode_num_accepted_tokens_total"][()] == 6
    per_position = page["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_position == {(("position", str(i)),): n for i, n in enumerate((4, 2, 0))}

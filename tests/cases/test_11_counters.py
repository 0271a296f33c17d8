"""Metrics of requests, and one tokenizer used by many threads."""

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.testing.api_client import CHAT, COMPLETIONS

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 253, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint)


def counters(server):
    """Returns all samples that may only grow, and asserts that the page is well formed."""
    page = server.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    values = {}
    for family in text_string_to_metric_families(page.text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in values
            assert not math.isnan(sample.value)
            if family.type in ("counter", "histogram"):
                values[key] = sample.value
    return values


def read_one_event(server, body):
    """Reads one event of a stream and disconnects."""
    with server.http.stream("POST", COMPLETIONS, json=body) as reply:
        assert reply.status_code == 200
        next(reply.iter_lines())


def test_js_181_gauges_fall_to_zero_after_all_clients_disconnect(server) -> None:
    """No later request updates them."""
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: read_one_event(server, ENDLESS), range(20)))
    server.until_idle(within_s=60)
    assert server.http.get("/load").json() == {"server_load": 0}


def test_js_182_every_request_is_counted_once(server) -> None:
    server.until_idle()
    before = counters(server)
    prompt = [1, 2, 3, 4]
    stopping = {"prompt": prompt, "allowed_token_ids": [9], "stop_token_ids": [9], "max_tokens": 5}
    usages = [server.post(COMPLETIONS, stopping).json()["usage"] for _ in range(10)]
    limited = {"prompt": prompt, "max_tokens": 7, "ignore_eos": True}
    usages += [server.post(COMPLETIONS, limited).json()["usage"] for _ in range(5)]
    assert [usage["completion_tokens"] for usage in usages] == [1] * 10 + [7] * 5
    middle = counters(server)
    aborted = 0
    while aborted < 5:  # a completion may finish before the server notices the disconnect
        read_one_event(server, ENDLESS)
        server.until_idle()
        aborted = (
            server.metric("request_success_total", finished_reason="abort")
            - before[finished_key("abort")]
        )
    for _ in range(5):
        assert server.post(COMPLETIONS, {**limited, "temperature": -1}).status_code == 400
    after = counters(server)

    assert before.keys() <= middle.keys() <= after.keys()
    assert all(before[key] <= middle[key] <= after[key] for key in before)

    def growth(name, *labels):
        """Returns the growth of the counters of this name in each of the two halves."""
        keys = [key for key in after if key[0] == f"vllm:{name}" and {*labels} <= {*key[1:]}]
        assert keys
        totals = [sum(values[key] for key in keys) for values in (before, middle, after)]
        return totals[1] - totals[0], totals[2] - totals[1]

    for reason, count in (("stop", 10), ("length", 5), ("abort", 0)):
        assert growth("request_success_total", ("finished_reason", reason))[0] == count
    assert growth("request_success_total", ("finished_reason", "abort"))[1] == 5
    num_disconnected = sum(growth("request_success_total")) - 15
    assert growth("prompt_tokens_total") == (15 * 4, num_disconnected * 3)
    first, second = growth("generation_tokens_total")
    assert first == sum(usage["completion_tokens"] for usage in usages)
    assert num_disconnected <= second <= num_disconnected * 253
    assert growth("e2e_request_latency_seconds_count")[0] == 15


def finished_key(reason):
    (engine, name) = (("engine", "0"), ("model_name", "rand"))
    return ("vllm:request_success_total", engine, ("finished_reason", reason), name)


def test_js_183_threads_can_share_a_tokenizer(server) -> None:
    tokenizer, rng = server.tokenizer, random.Random(183)
    alphabet = "hello world the in \n\u4e2d\U0001f525<|im_end|>"
    texts = ["".join(rng.choices(alphabet, k=rng.choice([5, 900]))) for _ in range(200)]
    serial = [tokenizer.encode(text, add_special_tokens=i % 2 == 0) for i, text in enumerate(texts)]

    def encode_all(start):
        order = [(start + i) % 200 for i in range(200)]
        ids = {i: tokenizer.encode(texts[i], add_special_tokens=i % 2 == 0) for i in order}
        return [ids[i] for i in range(200)]

    with ThreadPoolExecutor(32) as pool:
        assert all(result == serial for result in pool.map(encode_all, range(32)))


def test_js_183_concurrent_requests_are_tokenized_like_serial_ones(server) -> None:
    rng = random.Random(1183)
    texts = ["".join(rng.choices("hello world", k=k)) for k in (3, 50, 190, 450, 900)]
    calls = [
        call
        for text in texts
        for call in (
            (COMPLETIONS, {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 5}),
            (COMPLETIONS, {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": -1}),
            (COMPLETIONS, {"prompt": [text[:150], "x"], "max_tokens": 1}),
            (CHAT, {"messages": [{"role": "user", "content": text[:150]}], "max_tokens": 1}),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
            ("/detokenize", {"tokens": [rng.randrange(512) for _ in text]}),
        )
    ]

    def result(call):
        reply = server.post(*call)
        assert reply.status_code == 200, reply.text
        content = reply.json()
        return content.get("usage", {}).get("prompt_tokens") or content

    serial = list(map(result, calls))
    order = [i for _ in range(8) for i in rng.sample(range(len(calls)), len(calls))]
    with ThreadPoolExecutor(16) as pool:
        for i, concurrent in zip(order, pool.map(lambda i: result(calls[i]), order), strict=True):
            assert concurrent == serial[i]

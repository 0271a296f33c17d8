"""Runs of a batch of requests on a scripted engine."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jaxserve.errors import EngineDeadError
from jaxserve.front.admission import Permit
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.offline.batch_run import run_batch
from jaxserve.offline.open_files import RequestFile
from jaxserve.offline.result_file import ResultFile
from jaxserve.testing.scripted_engine import ScriptedEngine
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def make_text_engine(text: str = "hello world") -> tuple[TextEngine, ScriptedEngine]:
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    engine = ScriptedEngine(lambda submit: tokens)
    model = ServedModel.create(engine.ready, TOKENIZER, names=["tiny"])
    return TextEngine(engine, model), engine


class Batch:
    """The input file and the output file of a batch."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.num_loads = 0

    def write(self, *requests: dict | str) -> None:
        lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
        self.input.write_text("\n".join(lines) + "\n")

    async def run(self, text_engine: TextEngine, *, limit: int = 4) -> str:
        results = ResultFile(self.output, resume=True)

        @asynccontextmanager
        async def open_engine() -> AsyncGenerator[TextEngine, None]:
            self.num_loads += 1
            yield text_engine

        try:
            requests = RequestFile(self.input)
            totals = await run_batch(open_engine, requests, results, limit=lambda _: limit)
            return totals.describe()
        finally:
            results.close()

    def results(self) -> dict[str | None, dict]:
        lines = self.output.read_text().splitlines()
        return {result["custom_id"]: result for result in map(json.loads, lines)}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def completion(custom_id: str, **body) -> dict:
    body = {"prompt": "hello", "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


def chat(custom_id: str, **body) -> dict:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


async def test_results_have_the_bodies_of_the_api(batch: Batch) -> None:
    text_engine, _ = make_text_engine()
    batch.write(completion("a"), chat("b", max_tokens=2))
    summary = await batch.run(text_engine)
    results = batch.results()
    completed, chatted = (results[i]["response"]["body"] for i in ("a", "b"))
    assert completed["object"] == "text_completion"
    assert completed["model"] == "tiny"
    assert completed["choices"][0]["text"] == "hello world"
    assert completed["choices"][0]["finish_reason"] == "stop"
    assert completed["usage"]["prompt_tokens"] == len(TOKENIZER.encode("hello"))
    assert chatted["object"] == "chat.completion"
    message = chatted["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "hello world")
    assert chatted["choices"][0]["finish_reason"] == "length"
    assert summary.startswith("2 answered, 0 errors, ")


async def test_bad_lines_become_errors_and_the_run_continues(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    batch.write(
        completion("good"),
        "not json",
        {"custom_id": "url", "method": "POST", "url": "/v1/rerank", "body": {}},
        {"custom_id": "get", "method": "GET", "url": COMPLETIONS, "body": {}},
        completion("temperature", temperature=-1),
        completion("type", max_tokens="many"),
        completion("stream", stream=True),
        completion("model", model="gpt"),
        completion("long", prompt="x" * 5000),
        {"custom_id": "body", "method": "POST", "url": COMPLETIONS, "body": [1]},
        chat("messages", messages=[]),
        completion("good"),
        completion("last"),
    )
    summary = await batch.run(text_engine)
    lines = [json.loads(line) for line in batch.output.read_text().splitlines()]
    assert len(lines) == 13
    replies = [line for line in lines if line["error"] is None]
    status = {
        (
            line["custom_id"],
            line["response"]["status_code"],
            line["response"]["body"].get("error", {}).get("param"),
        )
        for line in replies
    }
    assert status == {
        ("good", 200, None),
        ("temperature", 400, "temperature"),
        ("type", 400, "max_tokens"),
        ("stream", 400, "stream"),
        ("model", 404, "model"),
        ("long", 400, "prompt"),
        ("body", 400, None),
        ("messages", 400, "messages"),
        ("last", 200, None),
    }
    not_run = {line["custom_id"]: line["error"] for line in lines if line["response"] is None}
    assert len(replies) + len(not_run) == 13
    assert not_run.keys() == {None, "url", "get", "good"}
    assert {error["code"] for error in not_run.values()} == {"invalid_line"}
    assert "/v1/rerank" in not_run["url"]["message"]
    assert "'GET'" in not_run["get"]["message"]
    assert "used before" in not_run["good"]["message"]
    assert summary.startswith("2 answered, 11 errors, ")
    assert len(engine.submitted) == 2


async def test_an_unexpected_error_fails_only_its_request(
    batch: Batch, monkeypatch, caplog
) -> None:
    text_engine, _ = make_text_engine()
    start = text_engine.start

    async def fail_one_prompt(request: GenerateRequest, permit: Permit):
        if request.prompts == [[1, 2, 3]]:
            raise RuntimeError("secret")
        return await start(request, permit)

    monkeypatch.setattr(text_engine, "start", fail_one_prompt)
    batch.write(completion("a", prompt=[1, 2, 3]), completion("b"))
    await batch.run(text_engine)
    results = batch.results()
    assert results["a"]["response"]["status_code"] == 500
    assert "secret" not in batch.output.read_text()
    assert "secret" in caplog.text
    assert results["b"]["response"]["status_code"] == 200


async def test_requests_in_flight_are_limited(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    most_in_flight = 0
    generate = engine.generate

    def observed_generate(*args, **options):
        nonlocal most_in_flight
        most_in_flight = max(most_in_flight, text_engine.num_in_flight)
        return generate(*args, **options)

    engine.generate = observed_generate  # type: ignore[method-assign]
    batch.write(*(completion(f"r{i}") for i in range(50)))
    await batch.run(text_engine, limit=3)
    assert most_in_flight == 3
    assert len(batch.results()) == 50


async def test_a_dead_engine_ends_the_run_and_resume_runs_the_rest(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    batch.write(*(completion(f"r{i}") for i in range(20)))
    generate = engine.generate

    def generate_until_dead(*args, **options):
        if len(engine.submitted) >= 9:
            engine.error = EngineDeadError("gone")
        return generate(*args, **options)

    engine.generate = generate_until_dead  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        await batch.run(text_engine)
    finished = batch.results()
    assert 0 < len(finished) < 20
    assert all(result["error"] is None for result in finished.values())

    text_engine, engine = make_text_engine()
    summary = await batch.run(text_engine)
    assert len(engine.submitted) == 20 - len(finished)
    assert f"and {len(finished)} kept from before" in summary
    assert len(batch.output.read_text().splitlines()) == 20
    assert batch.results().keys() == {f"r{i}" for i in range(20)}


async def test_resume_retries_failed_requests(batch: Batch) -> None:
    text_engine, _ = make_text_engine()
    batch.write(completion("a"), completion("b", temperature=-1), "not json")
    await batch.run(text_engine)
    batch.write(completion("a"), completion("b", temperature=0.5))
    await batch.run(text_engine)
    assert {i: r["response"]["status_code"] for i, r in batch.results().items()} == {
        "a": 200,
        "b": 200,
    }


async def test_a_run_with_nothing_to_do_loads_no_model(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    batch.write(completion("a"), completion("b"))
    await batch.run(text_engine)
    before = batch.output.read_bytes()
    assert (batch.num_loads, len(engine.submitted)) == (1, 2)
    assert (await batch.run(text_engine)).startswith("0 answered and 2 kept from before, 0 errors")
    batch.write(completion("b"))
    assert (await batch.run(text_engine)).startswith("0 answered and 1 kept from before, 0 errors")
    assert batch.output.read_bytes() == before
    batch.write(completion("b"), "not json", completion("a"), "[]")
    assert "2 kept from before, 2 errors" in await batch.run(text_engine)
    assert (batch.num_loads, len(engine.submitted)) == (1, 2)
    whole, lines = batch.output.read_bytes(), batch.output.read_text().splitlines()
    assert whole.startswith(before)
    reasons = [json.loads(line)["error"]["message"] for line in lines[2:]]
    assert [reason.partition(":")[0] for reason in reasons] == [
        "line 2 of the input",
        "line 4 of the input",
    ]


async def test_bad_lines_before_the_first_request_are_kept_in_order(batch: Batch) -> None:
    batch.write("not json", completion("a"), "null", completion("b"))
    summary = await batch.run(make_text_engine()[0], limit=1)
    assert summary.startswith("2 answered, 2 errors")
    lines = map(json.loads, batch.output.read_text().splitlines())
    assert [line["custom_id"] for line in lines] == [None, "a", None, "b"]


async def test_an_empty_input_gives_an_empty_output(batch: Batch) -> None:
    batch.input.write_text("")
    summary = await batch.run(make_text_engine()[0])
    assert summary.startswith("0 answered, 0 errors")
    assert batch.output.read_text() == ""
    assert batch.num_loads == 0

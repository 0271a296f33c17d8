"""A file of requests through a front end, with an engine that says what it is told to."""

import json
from pathlib import Path

import pytest

from jaxserve.errors import EngineDeadError
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.offline.batch_file import ResultFile
from jaxserve.offline.batch_run import run_batch
from jaxserve.testing.scripted_engine import ScriptedEngine
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def make_text_engine(says: str = "hello world") -> tuple[TextEngine, ScriptedEngine]:
    tokens = [*TOKENIZER.encode(says), TOKENIZER.eos_token_id]
    engine = ScriptedEngine(lambda submit: tokens)
    model = ServedModel.create(engine.ready, TOKENIZER, names=["tiny"])
    return TextEngine(engine, model), engine


class Batch:
    """The files of a batch, and what is in the output."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def write(self, *requests: dict | str) -> None:
        lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
        self.input.write_text("\n".join(lines) + "\n")

    async def run(self, text_engine: TextEngine, *, limit: int = 4) -> str:
        results = ResultFile.resume(self.output)
        try:
            return (await run_batch(text_engine, self.input, results, limit=limit)).describe()
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


async def test_bodies_are_those_of_the_api(batch: Batch) -> None:
    text_engine, _ = make_text_engine()
    batch.write(completion("a"), chat("b", max_tokens=2))
    said = await batch.run(text_engine)
    results = batch.results()
    completed, answered = (results[i]["response"]["body"] for i in ("a", "b"))
    assert completed["object"] == "text_completion"
    assert completed["model"] == "tiny"
    assert completed["choices"][0]["text"] == "hello world"
    assert completed["choices"][0]["finish_reason"] == "stop"
    assert completed["usage"]["prompt_tokens"] == len(TOKENIZER.encode("hello"))
    assert answered["object"] == "chat.completion"
    message = answered["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "hello world")
    assert answered["choices"][0]["finish_reason"] == "length"
    assert said.startswith("2 answered, 0 errors, ")


async def test_bad_lines_become_errors_and_the_run_goes_on(batch: Batch) -> None:
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
    said = await batch.run(text_engine)
    lines = [json.loads(line) for line in batch.output.read_text().splitlines()]
    assert len(lines) == 13
    ran = [line for line in lines if line["error"] is None]
    status = {
        (
            line["custom_id"],
            line["response"]["status_code"],
            line["response"]["body"].get("error", {}).get("param"),
        )
        for line in ran
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
    never = {line["custom_id"]: line["error"] for line in lines if line["response"] is None}
    assert len(ran) + len(never) == 13
    assert never.keys() == {None, "url", "get", "good"}
    assert {error["code"] for error in never.values()} == {"invalid_line"}
    assert "/v1/rerank" in never["url"]["message"]
    assert "'GET'" in never["get"]["message"]
    assert "used before" in never["good"]["message"]
    assert said.startswith("2 answered, 11 errors, ")
    assert len(engine.submitted) == 2


async def test_an_unexpected_error_costs_one_request(batch: Batch, monkeypatch, caplog) -> None:
    text_engine, _ = make_text_engine()
    generate = text_engine.generate

    def fails(request: GenerateRequest):
        if request.prompts == [[1, 2, 3]]:
            raise RuntimeError("secret")
        return generate(request)

    monkeypatch.setattr(text_engine, "generate", fails)
    batch.write(completion("a", prompt=[1, 2, 3]), completion("b"))
    await batch.run(text_engine)
    results = batch.results()
    assert results["a"]["response"]["status_code"] == 500
    assert "secret" not in batch.output.read_text()
    assert "secret" in caplog.text
    assert results["b"]["response"]["status_code"] == 200


async def test_no_more_than_the_limit_are_under_way(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    most = 0
    generate = engine.generate

    def watched(*args, **options):
        nonlocal most
        most = max(most, text_engine.num_in_flight)
        return generate(*args, **options)

    engine.generate = watched  # type: ignore[method-assign]
    batch.write(*(completion(f"r{i}") for i in range(50)))
    await batch.run(text_engine, limit=3)
    assert most == 3
    assert len(batch.results()) == 50


async def test_a_dead_engine_ends_the_run_and_resume_does_the_rest(batch: Batch) -> None:
    text_engine, engine = make_text_engine()
    batch.write(*(completion(f"r{i}") for i in range(20)))
    generate = engine.generate

    def dies_later(*args, **options):
        if len(engine.submitted) >= 9:
            engine.error = EngineDeadError("gone")
        return generate(*args, **options)

    engine.generate = dies_later  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        await batch.run(text_engine)
    finished = batch.results()
    assert 0 < len(finished) < 20
    assert all(result["error"] is None for result in finished.values())

    text_engine, engine = make_text_engine()
    said = await batch.run(text_engine)
    assert len(engine.submitted) == 20 - len(finished)
    assert f"and {len(finished)} kept from before" in said
    assert len(batch.output.read_text().splitlines()) == 20
    assert batch.results().keys() == {f"r{i}" for i in range(20)}


async def test_failed_requests_are_tried_again_by_resume(batch: Batch) -> None:
    text_engine, _ = make_text_engine()
    batch.write(completion("a"), completion("b", temperature=-1), "not json")
    await batch.run(text_engine)
    batch.write(completion("a"), completion("b", temperature=0.5))
    await batch.run(text_engine)
    assert {i: r["response"]["status_code"] for i, r in batch.results().items()} == {
        "a": 200,
        "b": 200,
    }


async def test_an_empty_file_gives_an_empty_file(batch: Batch) -> None:
    batch.input.write_text("")
    said = await batch.run(make_text_engine()[0])
    assert said.startswith("0 answered, 0 errors")
    assert batch.output.read_text() == ""

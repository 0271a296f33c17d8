"""The program that answers a file of requests."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.ipc.launch import FACTORY
from jaxserve.offline.__main__ import INTERRUPTED, main
from server.testing import flags

FAKE = "jaxserve.testing.fake_engine:build"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    start = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    body = {**start, "temperature": 0, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class Batch:
    """A file of requests and one of results, and runs from one to the other."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.model = model

    def write(self, *lines: dict[str, Any] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("\n".join(texts) + "\n")

    @property
    def argv(self) -> list[str]:
        return ["-i", str(self.input), "-o", str(self.output), "--model", str(self.model)]

    def run(self, *argv: str, factory: str = FAKE) -> int:
        return main([*self.argv, *argv], factory=factory)

    def results(self) -> list[dict[str, Any]]:
        """Every line is whole, or this raises an error."""
        text = self.output.read_text()
        assert text.endswith("\n") or not text
        return [json.loads(line) for line in text.splitlines()]

    def by_id(self) -> dict[str | None, dict[str, Any]]:
        results = self.results()
        assert len(results) == len({result["custom_id"] for result in results})
        return {result["custom_id"]: result for result in results}

    def texts(self) -> dict[str | None, str]:
        return {
            custom_id: result["response"]["body"]["choices"][0]["text"]
            for custom_id, result in self.by_id().items()
        }


@pytest.fixture
def batch(tmp_path: Path, front_checkpoint: Path) -> Batch:
    return Batch(tmp_path, front_checkpoint)


def test_js_229_a_bad_line_fails_alone(tmp_path: Path, script, settings) -> None:
    folder = script(ab=["A", "B", "<|im_end|>"])
    batch = Batch(tmp_path, folder)
    batch.write(
        request("first", prompt="<ab>"),
        '{"custom_id": "broken", "method"',
        request("long", prompt="x" * 2000),
        request("other", model="gpt-4"),
        request("last", prompt="<ab>", n=2),
    )
    # The rest of the tests keep compiled programs elsewhere, so a run of its own keeps none.
    own = flags(**{**settings, "compilation_cache_dir": ""})
    assert batch.run(*own, factory=FACTORY) == 0
    assert len(batch.results()) == 5
    results = batch.by_id()
    for custom_id, count in (("first", 1), ("last", 2)):
        assert results[custom_id]["error"] is None
        assert results[custom_id]["response"]["status_code"] == 200
        choices = results[custom_id]["response"]["body"]["choices"]
        assert [choice["text"] for choice in choices] == ["AB"] * count
    for custom_id, status in (("long", 400), ("other", 404)):
        assert results[custom_id]["response"]["status_code"] == status
        assert results[custom_id]["response"]["body"]["error"]["message"]
    assert "line 2" in results[None]["error"]["message"]
    error = results["long"]["response"]["body"]["error"]
    assert error["code"] == "context_length_exceeded"


def test_js_230_the_shape_of_results(batch: Batch) -> None:
    batch.write(request("a"), request("b", CHAT), request("c", temperature=-1), "{}")
    assert batch.run() == 0
    results = batch.by_id()
    assert results.keys() == {"a", "b", "c", None}
    for result in results.values():
        assert result.keys() == {"id", "custom_id", "response", "error"}
    assert results[None]["response"] is None
    assert results[None]["error"].keys() == {"code", "message"}
    responses = [results[custom_id]["response"] for custom_id in ("a", "b", "c")]
    assert all(r.keys() == {"status_code", "request_id", "body"} for r in responses)
    ids = [r["id"] for r in results.values()] + [r["request_id"] for r in responses]
    assert all(isinstance(i, str) and i for i in ids)
    assert len(set(ids)) == 7
    for custom_id, kind in (("a", "text_completion"), ("b", "chat.completion")):
        assert results[custom_id]["error"] is None
        body = results[custom_id]["response"]["body"]
        assert body["object"] == kind
        assert body["usage"]["completion_tokens"] <= 4
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert results["c"]["response"]["status_code"] == 400
    assert results["c"]["error"] is None
    error = results["c"]["response"]["body"]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == "temperature"


def without(key: str) -> dict[str, Any]:
    line = request("odd")
    del line[key]
    return line


@pytest.mark.parametrize(
    ("line", "says"),
    [
        *((without(key), key) for key in ("custom_id", "method", "url", "body")),
        *(({**request("odd"), key: None}, key) for key in ("custom_id", "method", "url", "body")),
        *(({**request("odd"), key: 5}, key) for key in ("custom_id", "method", "url", "body")),
        ({**request("odd"), "url": "/v1/unknown"}, "/v1/unknown"),
        ({**request("odd"), "method": "GET"}, "method"),
        (request("odd", stream=True), "stream"),
        (request("odd", prompt=None), "prompt"),
        (request("odd", CHAT, messages=[]), "messages"),
        ({**request("odd"), "body": []}, ""),
        ([request("odd")], ""),
        ("null", ""),
        ("\ufeff{", ""),
        (request("good"), "used before"),
    ],
)
def test_js_231_odd_lines(batch: Batch, line: Any, says: str) -> None:
    odd = line if isinstance(line, str | dict) else json.dumps(line)
    batch.write(request("good"), odd, request("after"))
    assert batch.run() == 0
    results = batch.results()
    assert len(results) == 3
    good = [r for r in results if (r["response"] or {}).get("status_code") == 200]
    assert sorted(r["custom_id"] for r in good) == ["after", "good"]
    (failed,) = [r for r in results if r not in good]
    if failed["error"] is None:
        assert failed["response"]["status_code"] == 400
        assert says in failed["response"]["body"]["error"]["message"]
    else:
        assert failed["response"] is None
        assert says in failed["error"]["message"]
    if isinstance(line, dict) and isinstance(line.get("custom_id"), str):
        assert failed["custom_id"] == line["custom_id"]


SLOW = """
import dataclasses, sys
from jaxserve.offline import __main__ as offline
from jaxserve.testing import fake_engine

def build(config, engine, on_progress):
    model = dataclasses.replace(config.model, model="fake:step_s=0.004")
    return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

if __name__ == "__main__":
    sys.exit(offline.main(sys.argv[1:], factory="slow_run:build"))
"""


@pytest.fixture
def run_to_half(batch: Batch, tmp_path: Path) -> Callable[..., Any]:
    """Runs 200 lines in a process, and does something to it when half of them are done."""
    (tmp_path / "slow_run.py").write_text(SLOW)
    batch.write(*(request(f"r{i}", prompt=f"hello {i}", max_tokens=12) for i in range(200)))

    @contextlib.contextmanager
    def run_to_half(*argv: str) -> Iterator[subprocess.Popen[str]]:
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        process = subprocess.Popen(
            [sys.executable, tmp_path / "slow_run.py", *batch.argv, "--max-num-seqs", "4", *argv],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while not batch.output.exists() or batch.output.read_bytes().count(b"\n") < 100:
                assert process.poll() is None
            yield process
        finally:
            process.kill()
            process.communicate()

    return run_to_half


def children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_whole_after_resuming(batch: Batch, capsys) -> None:
    """What was finished stays as it was, the rest is done, and nothing is mixed up."""
    before = batch.output.read_text().splitlines()
    assert 100 <= len(before) < 200
    assert all(result["error"] is None for result in batch.results())
    assert batch.run() == 1
    assert "--resume" in capsys.readouterr().err
    assert batch.run("--resume") == 0
    assert batch.output.read_text().splitlines()[: len(before)] == before
    texts = batch.texts()
    assert texts.keys() == {f"r{i}" for i in range(200)}
    assert batch.run("--overwrite") == 0
    assert batch.texts() == texts
    assert len(set(texts.values())) > 100


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_js_233_an_interrupt(batch: Batch, run_to_half, capsys, how: signal.Signals) -> None:
    with run_to_half() as process:
        engines = children(process.pid)
        assert len(engines) == 1
        process.send_signal(how)
        _, said = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in said
    assert "--resume" in said
    assert not any(map(is_alive, engines))
    assert_whole_after_resuming(batch, capsys)


def test_js_233_an_engine_that_dies(batch: Batch, run_to_half, capsys) -> None:
    with run_to_half() as process:
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search("^error: .*engine", said, re.MULTILINE)
    assert_whole_after_resuming(batch, capsys)


def test_js_233_a_program_that_is_killed(batch: Batch, run_to_half, capsys) -> None:
    with run_to_half() as process:
        (engine,) = children(process.pid)
        process.kill()
        process.wait()
    while is_alive(engine):
        os.sched_yield()
    if not batch.output.read_bytes().endswith(b"\n"):
        batch.output.write_bytes(batch.output.read_bytes().rpartition(b"\n")[0] + b"\n")
    assert_whole_after_resuming(batch, capsys)


def missing_folder(batch: Batch) -> Sequence[str]:
    batch.output = batch.output.parent / "missing" / "out.jsonl"
    return ()


def a_folder(batch: Batch) -> Sequence[str]:
    batch.output.mkdir()
    return ("--overwrite",)


def below_a_file(batch: Batch) -> Sequence[str]:
    batch.output.write_text("precious\n")
    batch.output = batch.output / "out.jsonl"
    return ()


def full_of_results(batch: Batch) -> Sequence[str]:
    batch.output.write_text("precious\n")
    return ()


@pytest.mark.parametrize("output", [missing_folder, a_folder, below_a_file, full_of_results])
def test_js_233_an_output_that_cannot_be(batch: Batch, capsys, output) -> None:
    """This is found out before the model is loaded, of which there is none here."""
    batch.write(request("a"))
    argv = output(batch)
    assert main([*batch.argv, "--model", "/no/model", *argv], factory=FAKE) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(batch.output) in said
    assert "/no/model" not in said
    assert len(said.splitlines()) == 1
    if output is full_of_results:
        assert batch.output.read_text() == "precious\n"


def test_js_233_a_model_that_cannot_be_loaded_leaves_no_trace(batch: Batch, capsys) -> None:
    batch.write(request("a"))
    assert main([*batch.argv, "--model", "/no/model"], factory=FAKE) == 1
    assert "/no/model" in capsys.readouterr().err
    assert batch.run() == 0
    assert batch.by_id()["a"]["error"] is None

"""The batch program: results, invalid lines, interruption and resuming."""

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
from jaxserve.offline.__main__ import main
from jaxserve.testing.waiting import wait_until
from server.testing import flags

FAKE = "jaxserve.testing.fake_engine:build"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    start = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    body = {**start, "temperature": 0, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class Batch:
    """A file of requests and a file of results, and runs of the batch program on them."""

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
        """Returns the results, and fails if a line is incomplete."""
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


def test_js_229_a_bad_line_fails_alone(tmp_path: Path, scripted_checkpoint, settings) -> None:
    folder = scripted_checkpoint(ab=["A", "B", "<|im_end|>"])
    batch = Batch(tmp_path, folder)
    batch.write(
        request("first", prompt="<ab>"),
        '{"custom_id": "broken", "method"',
        request("long", prompt="x" * 2000),
        request("other", model="gpt-4"),
        request("last", prompt="<ab>", n=2),
    )
    # The folder of compiled programs is a setting of the whole process, so this run sets none.
    batch_flags = flags(**{**settings, "compilation_cache_dir": ""})
    assert batch.run(*batch_flags, factory=FACTORY) == 0
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


def test_js_230_results_have_the_documented_fields(batch: Batch) -> None:
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


def request_without(key: str) -> dict[str, Any]:
    line = request("odd")
    del line[key]
    return line


@pytest.mark.parametrize(
    ("line", "word"),
    [
        *((request_without(key), key) for key in ("custom_id", "method", "url", "body")),
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
def test_js_231_an_invalid_line_gets_an_error(batch: Batch, line: Any, word: str) -> None:
    invalid = line if isinstance(line, str | dict) else json.dumps(line)
    batch.write(request("good"), invalid, request("after"))
    assert batch.run() == 0
    results = batch.results()
    assert len(results) == 3
    good = [r for r in results if (r["response"] or {}).get("status_code") == 200]
    assert sorted(r["custom_id"] for r in good) == ["after", "good"]
    (failed,) = [r for r in results if r not in good]
    if failed["error"] is None:
        assert failed["response"]["status_code"] == 400
        assert word in failed["response"]["body"]["error"]["message"]
    else:
        assert failed["response"] is None
        assert word in failed["error"]["message"]
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
    """``with run_to_half() as process``: runs 200 lines, of which half are done on entry."""
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

        def has_half() -> bool:
            assert process.poll() is None
            return batch.output.exists() and batch.output.read_bytes().count(b"\n") >= 100

        try:
            wait_until(has_half)
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


def assert_resumes(batch: Batch, capsys) -> None:
    """Asserts that a run with ``--resume`` keeps finished results and completes the rest."""
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


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_js_233_an_interrupted_run_can_be_resumed(
    batch: Batch, run_to_half, capsys, signal_number: signal.Signals
) -> None:
    with run_to_half() as process:
        engines = children(process.pid)
        assert len(engines) == 1
        process.send_signal(signal_number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal_number
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert not any(map(is_alive, engines))
    assert_resumes(batch, capsys)


def test_js_233_a_run_survives_the_death_of_its_engine(batch: Batch, run_to_half) -> None:
    with run_to_half() as process:
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "200 answered" in stderr
    results = [json.loads(line) for line in batch.output.read_text().splitlines()]
    assert sorted(r["custom_id"] for r in results) == sorted(f"r{i}" for i in range(200))
    assert {r["response"]["status_code"] for r in results} == {200}


def test_js_233_a_run_without_an_engine_can_be_resumed(batch: Batch, run_to_half, capsys) -> None:
    with run_to_half("--max-engine-restarts", "0") as process:
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search("^error: .*engine", stderr, re.MULTILINE)
    assert_resumes(batch, capsys)


def test_js_233_a_killed_run_can_be_resumed(batch: Batch, run_to_half, capsys) -> None:
    with run_to_half() as process:
        (engine,) = children(process.pid)
        process.kill()
        process.wait()
    wait_until(lambda: not is_alive(engine))
    if not batch.output.read_bytes().endswith(b"\n"):
        batch.output.write_bytes(batch.output.read_bytes().rpartition(b"\n")[0] + b"\n")
    assert_resumes(batch, capsys)


def missing_folder(batch: Batch) -> Sequence[str]:
    batch.output = batch.output.parent / "missing" / "out.jsonl"
    return ()


def existing_folder(batch: Batch) -> Sequence[str]:
    batch.output.mkdir()
    return ("--overwrite",)


def path_below_a_file(batch: Batch) -> Sequence[str]:
    batch.output.write_text("precious\n")
    batch.output = batch.output / "out.jsonl"
    return ()


def existing_results(batch: Batch) -> Sequence[str]:
    batch.output.write_text("precious\n")
    return ()


@pytest.mark.parametrize(
    "output", [missing_folder, existing_folder, path_below_a_file, existing_results]
)
def test_js_233_an_unusable_output_path_is_refused(batch: Batch, capsys, output) -> None:
    """The model does not exist, so the error must be found before the model is loaded."""
    batch.write(request("a"))
    argv = output(batch)
    assert main([*batch.argv, "--model", "/no/model", *argv], factory=FAKE) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert str(batch.output) in stderr
    assert "/no/model" not in stderr
    assert len(stderr.splitlines()) == 1
    if output is existing_results:
        assert batch.output.read_text() == "precious\n"


def test_js_233_a_model_that_cannot_be_loaded_leaves_no_output(batch: Batch, capsys) -> None:
    batch.write(request("a"))
    assert main([*batch.argv, "--model", "/no/model"], factory=FAKE) == 1
    assert "/no/model" in capsys.readouterr().err
    assert batch.run() == 0
    assert batch.by_id()["a"]["error"] is None

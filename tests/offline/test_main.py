"""The batch program: flags, exit codes and interrupts, with fake engines."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.offline.__main__ import main
from jaxserve.testing.waiting import wait_until

FACTORY = "jaxserve.testing.fake_engine:build"


def requests(path: Path, count: int, **body) -> Path:
    with path.open("w") as file:
        for i in range(count):
            body = {"prompt": f"hello {i}", "temperature": 0, "max_tokens": 8, **body}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def test_the_output_has_a_result_for_each_request(
    front_checkpoint: Path, tmp_path: Path, capsys
) -> None:
    source, out = requests(tmp_path / "in.jsonl", 30), tmp_path / "out.jsonl"
    argv = ["--model", str(front_checkpoint), "-i", str(source), "-o", str(out)]
    assert main(argv, factory=FACTORY) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["custom_id"] for r in results} == {f"r{i}" for i in range(30)}
    assert all(r["response"]["body"]["model"] == "tiny" for r in results)
    message = capsys.readouterr().err
    assert "30 answered, 0 errors" in message
    assert "output tokens/s" in message

    # A second run does not replace the results; resuming has nothing to do.
    assert main(argv, factory=FACTORY) == 1
    assert "--resume" in capsys.readouterr().err
    before = out.read_text()
    assert main([*argv, "--resume"], factory=FACTORY) == 0
    assert out.read_text() == before
    assert "0 answered and 30 kept from before" in capsys.readouterr().err


def test_prompts_on_the_command_line_are_completed_on_stdout(
    front_checkpoint: Path, capsys
) -> None:
    argv = ["--model", str(front_checkpoint), "--temperature", "0", "--max-tokens", "9"]
    assert main([*argv, "--prompt", "hello"], factory=FACTORY) == 0
    chat = capsys.readouterr().out
    assert main([*argv, "--prompt", "hello", "--raw"], factory=FACTORY) == 0
    raw = capsys.readouterr().out
    assert chat.endswith("\n")
    assert chat != raw
    assert main([*argv, "--prompt", "hello", "--prompt", "hello"], factory=FACTORY) == 0
    assert capsys.readouterr().out == f"> hello\n{chat}" * 2


def test_a_completion_may_fill_the_context(front_checkpoint: Path, capsys) -> None:
    argv = ["--model", str(front_checkpoint), "--prompt", "hello", "--temperature", "0"]
    assert main([*argv, "--max-model-len", "64"], factory=FACTORY) == 0
    assert len(capsys.readouterr().out) > 1


def test_engine_flags_reach_the_engine(front_checkpoint: Path, capsys) -> None:
    argv = ["--model", str(front_checkpoint), "--prompt", "hello " * 20, "--raw"]
    assert main([*argv, "--max-model-len", "16"], factory=FACTORY) == 1
    assert "maximum context length is 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["-i", "x"],
        ["-i", "x", "-o", "y", "--prompt", "z"],
        ["-i", "x", "-o", "y", "--resume", "--overwrite"],
        ["-i", "x", "-o", "y", "--max-in-flight", "0"],
    ],
)
def test_rejects_contradictory_flags(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv, factory=FACTORY)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_error_is_one_line(front_checkpoint: Path, tmp_path: Path, capsys) -> None:
    missing = str(tmp_path / "missing.jsonl")
    out = ["-o", str(tmp_path / "out.jsonl")]
    assert main(["-i", missing, *out], factory=FACTORY) == 1
    assert capsys.readouterr().err == f"error: there is no file {missing}\n"
    source = str(requests(tmp_path / "in.jsonl", 1))
    assert main(["-i", source, *out, "--model", "/no/model"], factory=FACTORY) == 1
    assert "error: there is no file or folder '/no/model'" in capsys.readouterr().err
    model = ["--model", str(front_checkpoint), "--policy", "fastest"]
    assert main(["-i", source, *out, "--overwrite", *model], factory=FACTORY) == 1
    assert "error: " in capsys.readouterr().err


SLOW = """
import dataclasses, sys
from jaxserve.offline import __main__ as offline
from jaxserve.testing import fake_engine

def build(config, engine, on_progress):
    model = dataclasses.replace(config.model, model="fake:step_s=0.004")
    return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

if __name__ == "__main__":
    sys.exit(offline.main(sys.argv[1:], factory="slow:build"))
"""


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_finished_results(
    front_checkpoint: Path, tmp_path: Path, interrupt: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    source, out = requests(tmp_path / "in.jsonl", 400, max_tokens=20), tmp_path / "out.jsonl"
    argv = ["--model", str(front_checkpoint), "-i", str(source), "-o", str(out), "--resume"]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, tmp_path / "slow.py", *argv, "--max-num-seqs", "8"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:

        def has_20_results() -> bool:
            assert process.poll() is None
            return out.exists() and out.read_bytes().count(b"\n") >= 20

        try:
            wait_until(has_20_results)
            process.send_signal(interrupt)
            _, message = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + interrupt, message
    assert "--resume continues" in message

    lines = out.read_text().splitlines()
    finished = [json.loads(line) for line in lines]
    assert 20 <= len(finished) < 400
    assert all(result["error"] is None for result in finished)
    assert f"{len(finished)} answered, 0 errors" in message

    assert main(argv, factory=FACTORY) == 0
    after = out.read_text().splitlines()
    assert after[: len(lines)] == lines
    assert {json.loads(line)["custom_id"] for line in after} == {f"r{i}" for i in range(400)}
    assert len(after) == 400

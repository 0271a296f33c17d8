"""What signals, and a standard error output that cannot be written, do to a batch run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxserve.testing.server_program import ServerProgram, assert_gone
from jaxserve.testing.waiting import wait_until

STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]

SLOW = """
import dataclasses, os, sys, time
from jaxserve.ipc.messages import Progress
from jaxserve.offline import __main__ as offline
from jaxserve.offline.result_file import ResultFile
from jaxserve.testing import fake_engine

def build(config, engine, on_progress, step_s=0.004):
    model = dataclasses.replace(config.model, model=f"fake:step_s={step_s}")
    return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)

def slow(config, engine, on_progress):
    return build(config, engine, on_progress, step_s=0.1)

def never(config, engine, on_progress):
    on_progress(Progress(engine, "compile", 1, 8, "programs", seconds=1.0))
    time.sleep(600)

def block(self):
    print("blocked", file=sys.stderr, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    kind, *argv = sys.argv[1:]
    if kind == "blocked":
        ResultFile.begin = block
    factory = "build" if kind == "blocked" else kind
    sys.exit(offline.program(argv, factory=f"slow_program:{factory}"))
"""


class Run(ServerProgram):
    """A run of the batch program on an input that stays open, and its results."""

    output_path: Path

    def results(self) -> dict[str, str]:
        """The reason of each answer so far; every line is whole."""
        if not self.output_path.exists():
            return {}
        lines = self.output_path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        bodies = {r["custom_id"]: r["response"]["body"] for r in map(json.loads, lines)}
        return {name: body["choices"][0]["finish_reason"] for name, body in bodies.items()}

    def catches(self, number: int) -> bool:
        """Whether the program handles a signal at present."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def start(tmp_path: Path, front_checkpoint: Path, monkeypatch) -> Iterator[Callable[..., Run]]:
    """``start(*lines, kind="build", **options)`` starts a run; ``lines`` are (ID, max_tokens)."""
    (tmp_path / "slow_program.py").write_text(SLOW)
    os.mkfifo(tmp_path / "in")
    with contextlib.ExitStack() as stack:
        # Opened for reading, too, so that neither end waits for the other.
        source = os.open(tmp_path / "in", os.O_RDWR)
        stack.callback(os.close, source)

        def start(
            *lines: tuple[str, int], kind: str = "build", argv=None, program=None, **options
        ) -> Run:
            for name, max_tokens in lines:
                body = {"prompt": "hi", "max_tokens": max_tokens, "ignore_eos": True}
                request = {"custom_id": name, "method": "POST", "url": "/v1/completions"}
                os.write(source, json.dumps({**request, "body": body}).encode() + b"\n")
            files = ["-i", tmp_path / "in", "-o", tmp_path / "out"]
            run = Run(
                *("--model", front_checkpoint, *(files if argv is None else argv)),
                cwd=tmp_path,
                program=program or (str(tmp_path / "slow_program.py"), kind),
                TMPDIR=str(tmp_path),
                **options,
            )
            run.output_path = tmp_path / "out"
            stack.callback(run.close)
            return run

        yield start


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_a_run_that_can_be_resumed(start, tmp_path, number) -> None:
    kind, max_tokens = ("build", 300) if number == signal.SIGQUIT else ("slow", 900)
    run = start(("short", 4), ("long", max_tokens), kind=kind)
    wait_until(run.results)
    processes = run.processes()
    run.signal(signal.SIGUSR1, signal.SIGUSR2, number)
    assert run.wait() == 128 + number
    # SIGQUIT lets requests in flight finish.
    expected = {"short", "long"} if number == signal.SIGQUIT else {"short"}
    assert run.results() == dict.fromkeys(expected, "length")
    assert "Traceback" not in run.output
    assert f"stopped by {number.name}" in run.output
    assert "--resume continues" in run.output
    assert_gone(processes, temporary=tmp_path)

    again = start(
        ("short", 4), ("long", 4), argv=["-i", tmp_path / "in", "-o", tmp_path / "out", "--resume"]
    )
    wait_until(lambda: len(again.results()) == 2 and again.catches(signal.SIGTERM))
    again.signal(signal.SIGTERM)
    assert again.wait() == 128 + signal.SIGTERM


def test_another_signal_ends_what_sigquit_lets_finish(start) -> None:
    run = start(("short", 4), ("long", 900), kind="slow")
    wait_until(run.results)
    run.signal(signal.SIGQUIT, signal.SIGQUIT, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGQUIT
    assert run.results() == {"short": "length"}


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_while_the_model_is_loaded(start, tmp_path, number) -> None:
    run = start(("a", 4), kind="never")
    run.wait_for("compile")
    processes = run.processes()
    run.signal(number)
    assert run.wait() == 128 + number
    assert "Traceback" not in run.output
    assert not (tmp_path / "out").exists()
    assert_gone(processes, temporary=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, *STOPPING])
def test_a_signal_during_the_imports(start, number) -> None:
    """The run waits for its input, so it does not end by itself."""
    run = start(program=("-m", "jaxserve.offline"), shell="ulimit -c 0")
    run.wait_for_imports("zmq")
    run.signal(number)
    if number == signal.SIGUSR1:
        wait_until(lambda: run.catches(signal.SIGTERM))
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    else:
        assert run.wait() in (128 + number, -number)
    assert "Traceback" not in run.output


def test_a_second_sigint_kills_a_run_whose_loop_is_blocked(start) -> None:
    run = start(("a", 4), kind="blocked")
    run.wait_for("blocked")
    run.signal(signal.SIGINT)
    wait_until(lambda: not run.catches(signal.SIGINT))
    run.signal(signal.SIGINT)
    assert run.wait() == -signal.SIGINT  # a shell says 130
    assert "Traceback" not in run.output


def test_nohup_keeps_a_run_going(start) -> None:
    run = start(("short", 4), ("long", 300), shell="trap '' HUP")
    wait_until(run.results)
    run.signal(signal.SIGHUP)
    wait_until(lambda: len(run.results()) == 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_stops_prompts(start, number) -> None:
    argv = ["--prompt", "hi", "--prompt", "hi", "--max-tokens", 500, "--override-generation-config"]
    run = start(argv=[*argv, '{"ignore_eos": true}'])
    run.wait_for("model: fake")
    run.signal(number)
    assert run.wait() == 128 + number
    assert "Traceback" not in run.output


# The standard error output.


@pytest.fixture
def gone() -> Iterator[int]:
    """A pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture
def full() -> Iterator[int]:
    """A pipe that nobody reads, and that holds no more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("kind", ["gone", "full", "no space", "closed"])
def test_a_run_needs_no_reader_of_its_log(start, tmp_path, request, kind) -> None:
    source = tmp_path / "in.jsonl"
    body = {"prompt": "hi", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    argv = ["-i", source, "-o", tmp_path / "out"]
    if kind in ("gone", "full"):
        run = start(argv=argv, stderr=request.getfixturevalue(kind))
    else:
        run = start(argv=argv, shell="exec 2>&-" if kind == "closed" else "exec 2>/dev/full")
    assert run.wait() == 0
    assert set(run.results()) == {"a"}


# The other standard streams.


def test_a_reader_of_completions_may_leave(start, tmp_path, front_checkpoint) -> None:
    """Python must not complain when it exits."""
    start()  # writes the program
    command = ["--model", front_checkpoint, "--prompt", "hi", "--prompt", "hi"]
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.closing(os.fdopen(writing, "wb", 0)):
        run = run_program(tmp_path, *command, stdout=writing)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "error: [Errno 32] Broken pipe"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("argv", "closing", "named"),
    [
        (["-i", "-", "-o", "-"], "<&-", "the standard input, from which --input reads"),
        (["-i", "-", "-o", "-"], ">&-", "the standard output, to which --output writes"),
        (["--prompt", "hi"], ">&-", "the standard output, to which completions are printed"),
    ],
)
def test_a_closed_stream_is_refused(start, tmp_path, argv, closing, named) -> None:
    """Otherwise another file could get its number, or the results would be lost."""
    start()
    run = run_program(tmp_path, *argv, shell=f'exec "$@" {closing}')
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {named}")
    assert run.stderr.endswith("is closed\n")


def run_program(
    folder: Path, *argv: object, shell: str = 'exec "$@"', stdout: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    program = folder / "slow_program.py"
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, program, "build", *map(str, argv)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])},
        stdout=stdout,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )

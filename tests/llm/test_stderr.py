"""Nobody needs to read the progress of an LLM: neither its start nor a call depends on it."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from jaxserve import SamplingParams
from jaxserve.llm import LLM

with LLM(sys.argv[1], factory="jaxserve.testing.fake_engine:build") as llm:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["a", "b"], params)
    print(*[len(output.outputs[0].token_ids) for output in outputs], flush=True)
"""


def run(shell: str, checkpoint: Path, stderr: int = subprocess.PIPE):
    """Runs the script in a shell, which may redirect its standard error output."""
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", SCRIPT, str(checkpoint)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
    )


@pytest.fixture
def gone_pipe() -> Iterator[int]:
    """A pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture
def gone_terminal() -> Iterator[int]:
    """A terminal that was closed."""
    terminal, side = pty.openpty()
    os.close(terminal)
    yield side
    os.close(side)


def test_the_progress_is_on_the_standard_error_output(front_checkpoint: Path) -> None:
    ended = run('exec "$@"', front_checkpoint)
    assert (ended.returncode, ended.stdout) == (0, "3 3\n")
    assert "load weights" in ended.stderr
    assert "Processed prompts: 100%" in ended.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_script_needs_no_standard_error_output(front_checkpoint: Path, redirection: str) -> None:
    """The progress is not in the output of the script, either."""
    ended = run(f'exec "$@" {redirection}', front_checkpoint)
    assert (ended.returncode, ended.stdout) == (0, "3 3\n")


@pytest.mark.parametrize("kind", ["gone_pipe", "gone_terminal"])
def test_a_script_needs_no_reader_of_its_progress(front_checkpoint: Path, kind, request) -> None:
    ended = run('exec "$@"', front_checkpoint, stderr=request.getfixturevalue(kind))
    assert (ended.returncode, ended.stdout) == (0, "3 3\n")

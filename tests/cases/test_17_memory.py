"""PUB-01: memory is sized from the limits of the process; too little is said in one sentence."""

import subprocess
import sys

import pytest

from jaxserve.testing.tiny import write_checkpoint
from server.testing import flags

LIMIT = 4 << 30

PROGRAMS = (("-m", "server", "--port", "0"), ("-m", "jaxserve.offline", "--prompt", "hi"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"num_blocks": 10**9}, "--num-blocks 1000000000 needs"),
        ({"kv_cache_memory_mib": 10**8}, "--kv-cache-memory-mib 100000000 does not fit"),
    ],
)
@pytest.mark.parametrize("is_limited", [False, True])
def test_a_cache_beyond_memory_is_one_sentence(checkpoint, asked, named, is_limited):
    argv = [sys.executable, "-m", "server", *flags(model=checkpoint, warmup=False, **asked)]
    if is_limited:
        argv = ["sh", "-c", f'ulimit -v {LIMIT // 1024} && exec "$@"', "sh", *argv]
    run = subprocess.run(
        [*argv, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "error" in line.lower()]
    assert named in line
    assert "use at most" in line
    if is_limited:
        assert "ulimit -v: 4096 MiB" in line


@pytest.mark.parametrize("program", PROGRAMS, ids=["server", "offline"])
def test_a_limit_below_the_needs_of_jax_is_one_sentence(checkpoint, program):
    """JAX itself raises an ImportError, or ends the process with SIGABRT, at some such limits."""
    command = [sys.executable, *program, *flags(model=checkpoint)]
    run = subprocess.run(
        ["sh", "-c", 'ulimit -v 1200000 && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    (line,) = [line for line in run.stderr.splitlines() if "starting" not in line]
    assert line.startswith("error: a process may use 1171 MiB of address space (ulimit -v)")
    assert "JAX needs about" in line

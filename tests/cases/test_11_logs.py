"""A log whose reader hangs or goes away stops neither the start, nor serving, nor draining."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from jaxserve.testing.api_client import COMPLETIONS
from jaxserve.testing.server_program import FAKE, TIMEOUT_S, ServerProgram, server_program
from jaxserve.testing.waiting import wait_until

MODEL = "fake:vocab=272,step_s=0.01"
BODY = {"prompt": "hello", "ignore_eos": True}
LONG = {**BODY, "max_tokens": 100, "stream": True}
NUM_LINES = 40_000

# Writes much more than a pipe and the relay hold, past Python's streams, as libraries in C++ do.
NOISY_FACTORY = f"""
import os
from jaxserve.testing import fake_engine

def build(config, engine, on_progress):
    for number in range({NUM_LINES}):
        os.write(2, b"line %06d of a library that writes its own log, from the engine\\n" % number)
    print("printed by the engine")
    return fake_engine.build(config, engine, on_progress)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint):
    """A folder with a checkpoint that has the name of the fake model."""
    folder = tmp_path_factory.mktemp("logs")
    make_front_checkpoint(folder / MODEL)
    (folder / "noisy_factory.py").write_text(NOISY_FACTORY)
    return folder


@pytest.fixture
def start(folder) -> Iterator[Callable[..., tuple[ServerProgram, str]]]:
    """``start(*flags, **options)`` starts a server and returns it and its URL."""
    with contextlib.ExitStack() as stack:

        def start(*flags, factory=FAKE, **options) -> tuple[ServerProgram, str]:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            flags = ("--port", port, "--shutdown-timeout", 50, *factory, *flags)
            # The shortest interval that still logs: lines arrive all the time.
            program = server_program(
                MODEL, *flags, "--log-stats-interval", 0.02, cwd=folder, **options
            )
            return stack.enter_context(program), f"http://127.0.0.1:{port}"

        yield start


@contextlib.contextmanager
def pipe(size: int = 1 << 16) -> Iterator[tuple[int, int]]:
    """Yields the ends of a pipe that holds ``size`` bytes. The block may close them."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, size)
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def wait_until_ready(server: ServerProgram, url: str) -> None:
    def is_ready() -> bool:
        assert server.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    wait_until(is_ready)


def assert_serves_and_drains(
    server: ServerProgram, url: str, before_signal: Callable[[], None] = lambda: None
) -> None:
    """Streams a completion, stops the server in the middle of it, and reads all its tokens."""
    with httpx.stream("POST", url + COMPLETIONS, json=LONG, timeout=TIMEOUT_S) as reply:
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        received = [next(events)]
        before_signal()
        assert httpx.get(f"{url}/live").status_code == 200
        server.signal(signal.SIGTERM)
        received += events
    *chunks, done = received
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert server.wait(within_s=60) == 0


def test_pub_35_the_reader_leaves_during_the_start(start) -> None:
    """``server | head -2``."""
    with pipe() as (read_end, write_end):
        server, url = start(stderr=write_end)
        os.close(write_end)
        with open(read_end, closefd=False) as log:
            assert "starting" in log.readline()
        os.close(read_end)
        wait_until_ready(server, url)
        assert_serves_and_drains(server, url)


def test_pub_35_the_reader_leaves_while_the_server_is_busy(start) -> None:
    with pipe() as (read_end, write_end):
        server, url = start(stderr=write_end)
        os.close(write_end)
        wait_until_ready(server, url)
        assert_serves_and_drains(server, url, lambda: os.close(read_end))


@pytest.mark.parametrize("shell", ["exec 2>&-", "exec <&- >&- 2>&-", "exec 2>/dev/full"])
def test_pub_35_the_log_goes_nowhere_from_the_start(start, shell) -> None:
    server, url = start(shell=shell, stderr=None)
    wait_until_ready(server, url)
    assert_serves_and_drains(server, url)
    assert server.output == ""


def test_m12_the_reader_of_the_log_hangs(start) -> None:
    """It reads nothing at all: the pipe is full before the engine has started."""
    with pipe(4096) as (_, write_end):
        server, url = start(stderr=write_end, factory=("--engine-factory", "noisy_factory:build"))
        os.close(write_end)
        wait_until_ready(server, url)
        for _ in range(3):
            assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 200
        assert_serves_and_drains(server, url)


def test_m12_the_reader_hangs_and_then_goes_on(start) -> None:
    with pipe(4096) as (read_end, write_end):
        server, url = start(stderr=write_end, factory=("--engine-factory", "noisy_factory:build"))
        os.close(write_end)
        wait_until_ready(server, url)
        os.set_blocking(read_end, False)
        log = b""

        def says_how_much_is_lost() -> bool:
            nonlocal log
            with contextlib.suppress(BlockingIOError):
                log += os.read(read_end, 1 << 20)
            return b"lines of the log are lost" in log

        wait_until(says_how_much_is_lost)
        os.set_blocking(read_end, True)
        server.signal(signal.SIGTERM)
        with open(read_end, "rb", closefd=False) as rest:
            log += rest.read()
        assert server.wait() == 0
    assert 1000 < log.count(b"of a library that writes its own log") < NUM_LINES
    assert b"Stopping; completions in flight: 0" in log


def test_the_log_of_an_engine_reaches_a_reader_in_order(start) -> None:
    server, url = start(factory=("--engine-factory", "noisy_factory:build"))
    wait_until_ready(server, url)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    numbers = list(map(int, re.findall(r"line (\d+) of a library", server.output)))
    lost = sum(map(int, re.findall(r"(\d+) lines of the log are lost", server.output)))
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 1000
    # None is lost unless this machine is too busy to read them.
    assert len(numbers) + lost >= NUM_LINES
    assert "printed by the engine" in server.output or lost


def test_pub_34_localhost_is_served_on_both_families(start) -> None:
    server, url = start("--host", "localhost")
    assert server.url == url.replace("127.0.0.1", "localhost")
    for address in ("127.0.0.1", "[::1]", "localhost"):
        reply = httpx.post(url.replace("127.0.0.1", address) + COMPLETIONS, json=BODY)
        assert reply.status_code == 200

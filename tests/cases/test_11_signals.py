"""Signals: which ones stop a server, what the requests in flight get, and what is left behind."""

import contextlib
import json
import resource
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest

from jaxserve.testing.api_client import COMPLETIONS
from jaxserve.testing.server_program import (
    FAKE,
    ROOT,
    TIMEOUT_S,
    assert_gone,
    server_program,
)
from jaxserve.testing.waiting import wait_until

MODEL = "fake:vocab=272,step_s=0.01"
BODY = {"prompt": "hello", "ignore_eos": True}
LONG = {**BODY, "max_tokens": 100}
ENDLESS = {**BODY, "max_tokens": 1000}

SLOW_FACTORY = """
import time
from jaxserve.ipc.messages import Progress

def build(config, engine, on_progress):
    on_progress(Progress(engine, "compile", 1, 8, "programs"))
    time.sleep(600)
"""

STUCK_FACTORY = """
import time
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_runner import FakeRunner

def build(config, engine, on_progress):
    FakeRunner.execute = lambda self, plan: time.sleep(600)
    return fake_engine.build(config, engine, on_progress)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint):
    """A folder with a checkpoint that has the name of the fake model."""
    folder = tmp_path_factory.mktemp("signals")
    make_front_checkpoint(folder / MODEL)
    return folder


@pytest.fixture(params=[1, 2], ids=["one front", "two fronts"])
def fronts(request):
    """The number of front processes; with one, the front is in the main process."""
    return request.param


@pytest.fixture
def server(folder, tmp_path, fronts):
    """``server(*flags, **options)`` starts a server with a temporary folder of its own."""
    with contextlib.ExitStack() as stack:

        def start(*flags, factory=FAKE, **options):
            options = {"cwd": folder, "TMPDIR": str(tmp_path), **options}
            flags = ("--api-server-count", fronts, *flags)
            program = server_program(MODEL, "--port", 0, *factory, *flags, **options)
            return stack.enter_context(program)

        yield start


@contextlib.contextmanager
def streaming(url, body):
    """Yields an iterator over the events that follow the first one."""
    with httpx.stream(
        "POST", url + COMPLETIONS, json={**body, "stream": True}, timeout=60
    ) as reply:
        assert reply.status_code == 200
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(events)
        yield events


def finish_reason(events) -> str:
    """Reads a stream to its end. Returns the finish reason of its last chunk."""
    *_, last, done = events
    assert done == "[DONE]"
    return json.loads(last)["choices"][0]["finish_reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_m11_a_signal_drains_and_refuses_new_requests(server, tmp_path, number) -> None:
    started = server("--shutdown-timeout", "inf" if number == signal.SIGHUP else 50)
    url, processes = started.url, started.processes()
    # Long enough for all the requests below, on a slow machine too.
    with streaming(url, {**BODY, "max_tokens": 500}) as events:
        started.signal(number)
        started.wait_for("Stopping; completions in flight: 1")
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/embeddings"):
            refused = httpx.post(url + path, json=BODY)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "shutting down" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/live").status_code == 200
        assert finish_reason(events) == "length"
    assert started.wait() == 0
    assert_gone(processes, temporary=tmp_path)


def test_m11_sigquit_drains_without_a_limit(server) -> None:
    started = server("--shutdown-timeout", 0)
    with streaming(started.url, LONG) as events:
        started.signal(signal.SIGQUIT)
        started.wait_for("Stopping")
        assert finish_reason(events) == "length"
    assert started.wait() == 0


def test_m11_sigterm_limits_the_time_that_sigquit_gave(server) -> None:
    started = server("--shutdown-timeout", 0)
    with streaming(started.url, ENDLESS) as events:
        started.signal(signal.SIGQUIT)
        started.wait_for("Stopping")
        started.signal(signal.SIGQUIT, signal.SIGTERM)
        assert finish_reason(events) == "abort"
    assert started.wait() == 0


def test_m11_after_a_first_signal_only_sigint_aborts_at_once(server) -> None:
    """Shells and ``timeout`` send SIGTERM and SIGHUP twice: to a process and to its group."""
    started = server("--shutdown-timeout", 50)
    url = started.url
    with streaming(url, ENDLESS) as events, streaming(url, LONG) as short:
        started.signal(signal.SIGTERM)
        started.wait_for("Stopping")
        started.signal(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        assert finish_reason(short) == "length"
        started.signal(signal.SIGINT)
        assert finish_reason(events) == "abort"
    assert started.wait(within_s=45) == 0


def test_m11_a_second_sigint_does_not_wait_for_a_stuck_engine(server, tmp_path, folder) -> None:
    """An engine has 5 s to end its step, if nobody is in a hurry.

    Both times include what the machine needs for the rest.
    """
    (tmp_path / "stuck_factory.py").write_text(STUCK_FACTORY)
    (tmp_path / MODEL).symlink_to(folder / MODEL)

    def seconds_to_stop(shutdown_timeout: int, num_sigints: int) -> float:
        factory = ("--engine-factory", "stuck_factory:build")
        flags = ("--shutdown-timeout", shutdown_timeout)
        started = server(*flags, factory=factory, cwd=tmp_path)
        url, processes = started.url, started.processes()
        replies: list[httpx.Response] = []
        client = threading.Thread(
            target=lambda: replies.append(httpx.post(url + COMPLETIONS, json=BODY, timeout=60))
        )
        client.start()
        wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 1})
        for _ in range(num_sigints):
            began = time.monotonic()
            started.signal(signal.SIGINT)
            started.wait_for("Stopping")
        assert started.wait() == 0
        seconds = time.monotonic() - began
        client.join(TIMEOUT_S)
        assert replies[0].status_code == 503
        assert_gone(processes, temporary=tmp_path)
        return seconds

    assert seconds_to_stop(50, num_sigints=2) < seconds_to_stop(0, num_sigints=1) - 2


def test_a_whole_reply_that_is_cut_is_a_503(server) -> None:
    """With the status 200, half a reply would pass for a whole one."""
    started = server("--shutdown-timeout", 0)
    url = started.url
    replies: list[httpx.Response] = []
    client = threading.Thread(
        target=lambda: replies.append(httpx.post(url + COMPLETIONS, json=ENDLESS, timeout=60))
    )
    client.start()
    wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 1})
    started.signal(signal.SIGTERM)
    client.join(TIMEOUT_S)
    assert replies[0].status_code == 503
    assert int(replies[0].headers["retry-after"]) > 0
    assert started.wait() == 0


def test_a_request_whose_body_is_still_arriving_is_answered(server) -> None:
    """It has been accepted, although no engine knows it yet."""
    started = server("--shutdown-timeout", 50)
    url = httpx.URL(started.url)
    raw = json.dumps(LONG).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection((url.host, url.port), timeout=TIMEOUT_S) as client:
        # The reply to the first request shows that the head of the second has arrived.
        client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" + head + raw[:5])
        received = b""
        while b"HTTP/1.1 200" not in received:
            received += client.recv(1 << 16)
        started.signal(signal.SIGTERM)
        started.wait_for("Stopping; completions in flight: 0")
        client.sendall(raw[5:])
        while data := client.recv(1 << 16):
            received += data
    assert b'"finish_reason":"length"' in received
    assert started.wait() == 0


def test_m11_other_signals_do_nothing(server) -> None:
    """There is no log file to reopen: the log is standard error."""
    started = server()
    url = started.url
    front, *children = started.processes()
    with streaming(url, LONG) as events:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            started.signal(number)
        for child in children:
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
                child.send_signal(number)
        assert finish_reason(events) == "length"
    assert httpx.get(f"{url}/health").status_code == 200
    assert front.is_running()
    started.signal(signal.SIGTERM)
    assert started.wait() == 0


def test_m11_nohup_keeps_a_server_running(server) -> None:
    started = server(shell="trap '' HUP")
    url = started.url
    started.signal(signal.SIGHUP)
    assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 200
    started.signal(signal.SIGTERM)
    assert started.wait() == 0


STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", STOPPING)
def test_m11_a_signal_during_the_start(server, tmp_path, folder, number) -> None:
    (tmp_path / "slow_factory.py").write_text(SLOW_FACTORY)
    (tmp_path / MODEL).symlink_to(folder / MODEL)
    started = server(factory=("--engine-factory", "slow_factory:build"), cwd=tmp_path)
    started.wait_for("compile")
    processes = started.processes()
    started.signal(signal.SIGUSR1, number)
    assert started.wait() == 128 + number
    assert "Traceback" not in started.output
    assert f"stopped by {number.name}" in started.output
    assert_gone(processes, temporary=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT])
def test_m11_a_signal_during_the_imports(server, number) -> None:
    started = server(shell="ulimit -c 0")
    started.wait_for_imports()
    started.signal(signal.SIGUSR1, number)
    if number == signal.SIGUSR1:
        started.wait_for("URL")
        started.signal(signal.SIGTERM)
        assert started.wait() == 0
    else:
        assert started.wait() in (128 + number, -number)
    assert "Traceback" not in started.output


def test_m11_a_signal_to_every_process_during_the_start(server, tmp_path, folder) -> None:
    """systemd sends SIGTERM, and then SIGHUP, to all processes of a service."""
    (tmp_path / "slow_factory.py").write_text(SLOW_FACTORY)
    (tmp_path / MODEL).symlink_to(folder / MODEL)
    started = server(factory=("--engine-factory", "slow_factory:build"), cwd=tmp_path)
    wait_until(lambda: len(started.processes()) >= 2)  # the others are still importing packages
    for process in reversed(processes := started.processes()):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
    assert started.wait() in (128 + signal.SIGTERM, 128 + signal.SIGHUP)
    assert "Traceback" not in started.output
    assert_gone(processes, temporary=tmp_path)


def test_m11_a_file_that_cannot_be_read_does_not_keep_a_stopped_server(server, tmp_path) -> None:
    """The sleep stands for a hanging network disk, or for a long download."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "from jaxserve.front.served_model import ModelFiles\n"
        "ModelFiles.open = lambda config: time.sleep(600)\n"
    )
    started = server(PYTHONPATH=f"{tmp_path}:{ROOT}")
    started.wait_for("compile")  # the fake engine reads no files
    started.signal(signal.SIGTERM)
    assert started.wait(within_s=60) == 128 + signal.SIGTERM
    assert "Traceback" not in started.output


def test_m11_signals_that_arrive_late_change_nothing(server) -> None:
    started = server()
    started.wait_for("URL")
    started.signal(signal.SIGINT)
    while started.process.poll() is None:
        started.signal(*STOPPING)
    assert started.wait() == 0
    assert "Traceback" not in started.output
    assert "KeyboardInterrupt" not in started.output


def test_sigkill_leaves_no_process_and_the_next_start_removes_the_folder(
    server, tmp_path, fronts
) -> None:
    (tmp_path / "jaxserve-of-someone").mkdir()
    alive, killed = server(), server("--data-parallel-size", 2)
    grammar = {**BODY, "max_tokens": 1, "guided_regex": "[a-z]+x"}
    assert httpx.post(killed.url + COMPLETIONS, json=grammar, timeout=60).status_code == 200
    alive.wait_for("URL")
    processes = killed.processes()
    more = 0 if fronts == 1 else fronts
    assert len(processes) == 4 + more, "two engines, a process that checks grammars, and fronts"
    killed.signal(signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert not left
    folders = set(tmp_path.glob("jaxserve-*"))
    assert len(folders) == 3
    started = server()
    url = started.url
    after = set(tmp_path.glob("jaxserve-*"))
    assert len(folders & after) == 2, "the folders of the live server and of someone else"
    assert len(after) == 3
    for each in (alive.url, url):
        assert httpx.post(each + COMPLETIONS, json=BODY).status_code == 200


def test_the_limit_of_open_files_is_logged_once(server) -> None:
    started = server(shell="ulimit -n 64")
    url = httpx.URL(started.url)
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1024)), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(100):
            client = socket.create_connection((url.host, url.port), timeout=TIMEOUT_S)
            stack.enter_context(client)
        started.wait_for("this process cannot open more files")
    assert httpx.post(str(url) + COMPLETIONS, json=BODY).status_code == 200
    started.signal(signal.SIGTERM)
    assert started.wait() == 0
    assert started.output.count("cannot open more files") == 1

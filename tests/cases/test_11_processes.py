"""Server processes: start, stop, signals, dead engines and limits of the system."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from jaxserve.ipc.socket_folder import MAX_SOCKET_PATH, SocketFolder
from jaxserve.testing.api_client import COMPLETIONS
from jaxserve.testing.server_program import FAKE, ROOT, TIMEOUT_S
from jaxserve.testing.server_program import assert_gone as assert_ended
from jaxserve.testing.server_program import server_program as program
from jaxserve.testing.waiting import until, wait_until
from server.settings import ServerSettings

MODEL = "fake:vocab=272,step_s=0.01"
SOFT_FILES = 256
BODY = {"prompt": "hello", "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint):
    """A folder with a checkpoint that has the name of the fake model."""
    folder = tmp_path_factory.mktemp("programs")
    make_front_checkpoint(folder / MODEL)
    return folder


def assert_gone(processes, *, temporary: Path, url: str | None = None) -> None:
    """Asserts that the processes and their sockets are gone and that the port is free."""
    assert_ended(processes, temporary=temporary)
    if url is not None:
        with socket.create_server(("127.0.0.1", httpx.URL(url).port)):
            pass


def open_stream(stack, url):
    """Starts a stream, and returns an iterator over the lines after the first."""
    body = {**ENDLESS, "stream": True}
    reply = stack.enter_context(httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60))
    lines = (line for line in reply.iter_lines() if line)
    next(lines)
    return lines


@pytest.mark.parametrize("keeps_running", [False, True])
def test_js_168_without_restarts_the_death_of_the_engine_fails_its_requests(
    folder, tmp_path, keeps_running
) -> None:
    flags = ("--max-engine-restarts", 0, *(("--keep-running",) if keeps_running else ()))
    with program(MODEL, "--port", 0, *flags, *FAKE, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url = server.url
        front, engine = server.processes()
        with contextlib.ExitStack() as stack:
            streams = [open_stream(stack, url) for _ in range(2)]
            replies: list[httpx.Response] = []
            client_thread = threading.Thread(
                target=lambda: replies.append(
                    httpx.post(url + COMPLETIONS, json=ENDLESS, timeout=60)
                )
            )
            client_thread.start()
            wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 3})
            engine.kill()
            for stream in streams:
                *_, error, done = stream
                assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
                assert done == "data: [DONE]"
            client_thread.join()
        assert replies[0].status_code == 503
        assert "SIGKILL" in replies[0].json()["error"]["message"]
        if keeps_running:
            assert httpx.get(f"{url}/health").status_code == 503
            assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 503
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        else:
            assert server.wait() == 1
            assert "restarts of engine 0 are used up" in server.output
            assert re.search(r"error: engine 0 .*SIGKILL", server.output)
        assert_gone([front, engine], temporary=tmp_path, url=url)


def test_js_168_a_stream_goes_on_after_the_death_of_the_engine(folder, tmp_path) -> None:
    body = {**BODY, "max_tokens": 100, "temperature": 0, "stream": True, "logprobs": 0}
    with program(MODEL, "--port", 0, *FAKE, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url = server.url

        def read(*, kill: bool) -> list[dict]:
            """Returns the choices of the events of a stream; kills the engine after the first."""
            choices = []
            with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        choices += json.loads(line.removeprefix("data: "))["choices"]
                        if kill and len(choices) == 1:
                            server.processes()[1].kill()
                assert line == "data: [DONE]" or not line
            return choices

        def answer(choices: list[dict]) -> tuple:
            tokens = [token for c in choices for token in c["logprobs"]["tokens"]]
            return "".join(c["text"] for c in choices), choices[-1]["finish_reason"], tokens

        undisturbed = answer(read(kill=False))
        assert answer(read(kill=True)) == undisturbed
        assert len(undisturbed[2]) == 100
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert 'engine_restarts_total{model_name="' in httpx.get(f"{url}/metrics").text
        assert answer(read(kill=False)) == undisturbed


@pytest.mark.parametrize(
    ("loaded", "to_group", "times"), [(False, False, 1), (True, True, 1), (True, False, 2)]
)
def test_js_171_an_interrupt_stops_all_processes(folder, tmp_path, loaded, to_group, times) -> None:
    shutdown_timeout = "0.3" if times == 1 else "60"
    flags = ("--port", 0, "--shutdown-timeout", shutdown_timeout, *FAKE)
    with program(MODEL, *flags, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url, processes = server.url, server.processes()
        with contextlib.ExitStack() as stack:
            streams = [open_stream(stack, url) for _ in range(2 * loaded)]
            for _ in range(times):
                (os.killpg if to_group else os.kill)(server.process.pid, signal.SIGINT)
                server.wait_for("Stopping")
            for stream in streams:
                *_, last, done = stream
                assert '"finish_reason":"abort"' in last
                assert done == "data: [DONE]"
        assert server.wait() in (0, 130)
        assert "Traceback" not in server.output
        assert_gone(processes, temporary=tmp_path, url=url)


def test_js_173_open_streams_do_not_keep_the_server_alive(folder, tmp_path) -> None:
    assert ServerSettings().shutdown_timeout <= 8
    flags = ("--port", 0, "--shutdown-timeout", 0.5, *FAKE)
    with program(MODEL, *flags, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url, processes = server.url, server.processes()
        port = httpx.URL(url).port
        raw = json.dumps({**ENDLESS, "stream": True, "n": 20}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with contextlib.ExitStack() as stack:
            # Two clients do not read; the buffer of the second is small and soon full.
            for size in (None, 4096):
                client = stack.enter_context(socket.socket())
                if size is not None:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
                client.connect(("127.0.0.1", port))
                client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            stream = open_stream(stack, url)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Stopping")
            with contextlib.suppress(httpx.TransportError):
                assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 503
            *_, last, done = stream
            assert '"finish_reason":"abort"' in last
            assert done == "data: [DONE]"
            assert server.wait() == 0
        assert_gone(processes, temporary=tmp_path, url=url)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["", "starting", "load weights", "compile"])
def test_js_174_a_signal_during_the_start_stops_the_server(
    random_checkpoint, settings, tmp_path, phase, signal_number
) -> None:
    """Uses a real engine. In the first phase, the server is still importing packages."""
    flags = ("--model", random_checkpoint, "--port", 0, "--max-num-seqs", 8, "--dtype", "float32")
    with program(*flags, "--compilation-cache-dir", "", TMPDIR=str(tmp_path)) as server:
        if phase:
            server.wait_for(phase)
        else:
            server.wait_for_imports()
        processes = server.processes()
        server.process.send_signal(signal_number)
        assert server.wait() in (128 + signal_number, -signal_number)
        assert "Traceback" not in server.output
        assert len(server.output.splitlines()) < 12
        assert_gone(processes, temporary=tmp_path)


def test_js_174_a_signal_during_the_first_compilation_stops_the_server(
    random_checkpoint, tmp_path
) -> None:
    flags = ("--model", random_checkpoint, "--port", 0, "--no-warmup", "--shutdown-timeout", 0.2)
    with program(*flags, "--compilation-cache-dir", "", TMPDIR=str(tmp_path)) as server:
        url, processes = server.url, server.processes()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(contextlib.closing(httpx.Client(timeout=60)))
            client_thread = threading.Thread(
                target=lambda: client.post(url + COMPLETIONS, json=BODY)
            )
            client_thread.start()
            wait_until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 1})
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            client_thread.join()
        assert "Traceback" not in server.output
        assert_gone(processes, temporary=tmp_path, url=url)


def test_js_175_a_port_in_use_is_reported(random_checkpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with program("--model", random_checkpoint, "--port", port) as server:
            assert server.wait() == 1
    assert str(port) in server.output
    assert server.output.startswith("error: ")
    assert len(server.output.splitlines()) == 1


def test_js_176_servers_on_one_machine_are_independent(folder, tmp_path) -> None:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                program(
                    *(MODEL, "--served-model-name", f"model-{i}", "--port", 0, *FAKE),
                    cwd=folder,
                    TMPDIR=str(tmp_path),
                )
            )
            for i in range(4)
        ]
        urls = [server.url for server in servers]
        assert len(set(urls)) == 4
        for i, url in enumerate(urls):
            reply = httpx.post(url + COMPLETIONS, json={**BODY, "max_tokens": 3}).json()
            assert reply["model"] == f"model-{i}"
            assert reply["usage"]["completion_tokens"] == 3
        engines = {server.processes()[1].pid for server in servers}
        assert len(engines) == 4


@pytest.fixture(scope="module")
def constrained_server(folder, tmp_path_factory):
    """A server with few open files, a long TMPDIR with an old socket, and a long model path."""
    temporary = tmp_path_factory.mktemp("t") / ("t" * 120)
    (temporary / "jaxserve-old").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as old_socket:
        os.chdir(temporary)
        old_socket.bind("jaxserve-old/events")
        os.chdir(ROOT)
    long_folder = folder / ("d" * 100) / ("e" * 100)
    long_folder.mkdir(parents=True)
    (long_folder / "model").symlink_to(folder / MODEL)
    flags = ("--model", long_folder / "model", "--port", 0, *FAKE)
    with program(*flags, shell=f"ulimit -Sn {SOFT_FILES}", TMPDIR=str(temporary)) as server:
        yield server


def test_js_177_the_server_works_with_long_paths(constrained_server) -> None:
    reply = httpx.post(constrained_server.url + COMPLETIONS, json={**BODY, "max_tokens": 3}).json()
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["model"] == "model"


@pytest.mark.parametrize("name", ["t" * 120, "\u4e2d" * 40, "missing/folder", "short"])
def test_js_177_socket_paths_are_short_and_private(tmp_path, monkeypatch, name) -> None:
    if name != "missing/folder":
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = SocketFolder()
    try:
        for address in (folder.events(999), folder.requests(999)):
            path = Path(address.removeprefix("ipc://"))
            assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
            with socket.socket(socket.AF_UNIX) as unix_socket:
                unix_socket.bind(str(path))
        assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
    assert not Path(folder.path).exists()


async def test_js_178_connections_may_exceed_the_soft_limit_of_files(constrained_server) -> None:
    url = httpx.URL(constrained_server.url)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    raw = json.dumps({**BODY, "max_tokens": 5, "stream": True}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode()
    front, engine = constrained_server.processes()
    before = (front.num_fds(), engine.num_fds())
    assert before[0] < SOFT_FILES < 600
    all_open = asyncio.Event()

    async def stream():
        reader, writer = await asyncio.open_connection(url.host, url.port)
        await all_open.wait()
        writer.write(head + raw)
        reply = await reader.read()
        writer.close()
        return reply

    try:
        async with asyncio.timeout(TIMEOUT_S):
            streams = [asyncio.create_task(stream()) for _ in range(600)]
            # The front holds all connections at once, and none of them can end before that.
            await until(lambda: front.num_fds() >= before[0] + 600)
            all_open.set()
            replies = await asyncio.gather(*streams)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for reply in replies:
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert b"data: [DONE]" in reply
    assert engine.num_fds() <= before[1] + 4
    await until(lambda: front.num_fds() <= before[0] + 4)

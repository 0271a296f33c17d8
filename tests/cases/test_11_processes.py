"""How the processes of a server begin, end, and get on with others."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from jaxserve.ipc.transport import MAX_SOCKET_PATH, SocketFolder
from jaxserve.testing.api_client import COMPLETIONS
from server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
FAKE = ("--engine-factory", "jaxserve.testing.fake_engine:build")
MODEL = "fake:vocab=272,step_s=0.01"
TIMEOUT_S = 60
BODY = {"prompt": "hello", "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 1000}


class Program:
    """``python -m server`` in a session of its own, and what it prints."""

    def __init__(self, *args, cwd=ROOT, soft_files=None, **environment) -> None:
        command = [sys.executable, "-m", "server", *map(str, args)]
        if soft_files is not None:
            command = ["sh", "-c", f'ulimit -Sn {soft_files} && exec "$@"', "sh", *command]
        self._news = threading.Condition()
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern) -> re.Match[str]:
        """Waits until this has been printed."""
        with self._news:
            self._news.wait_for(
                lambda: re.search(pattern, self.output) or not self._reader.is_alive(), TIMEOUT_S
            )
        match = re.search(pattern, self.output)
        assert match, self.output
        return match

    def wait_for_imports(self) -> None:
        """Waits until it is in the midst of loading packages."""
        maps, end = Path(f"/proc/{self.process.pid}/maps"), time.monotonic() + TIMEOUT_S
        while "msgspec" not in maps.read_text():
            assert time.monotonic() < end

    @property
    def url(self) -> str:
        """Known as soon as it is ready."""
        return self.wait_for(r"URL +(http://\S+)/v1")[1]

    def family(self) -> list[psutil.Process]:
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def end(self) -> int:
        """Waits for the end and returns the exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


@contextlib.contextmanager
def program(*args, **options):
    started = Program(*args, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.end()
        started.process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint):
    """Where the name of the fake model is that of a checkpoint."""
    folder = tmp_path_factory.mktemp("programs")
    make_front_checkpoint(folder / MODEL)
    return folder


def assert_gone(family, *, temporary: Path, url: str | None = None) -> None:
    """No process, no socket, and the port is free."""
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not list(temporary.glob("jaxserve-*"))
    if url is not None:
        with socket.create_server(("127.0.0.1", httpx.URL(url).port)):
            pass


def open_stream(stack, url):
    """A stream that has begun: an iterator over its lines."""
    body = {**ENDLESS, "stream": True}
    reply = stack.enter_context(httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60))
    lines = (line for line in reply.iter_lines() if line)
    next(lines)
    return lines


def test_js_168_a_dead_engine_is_noticed(folder, tmp_path) -> None:
    with program(MODEL, "--port", 0, *FAKE, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url = server.url
        front, engine = server.family()
        with contextlib.ExitStack() as stack:
            streams = [open_stream(stack, url) for _ in range(2)]
            plain: list[httpx.Response] = []
            waiting = threading.Thread(
                target=lambda: plain.append(httpx.post(url + COMPLETIONS, json=ENDLESS, timeout=60))
            )
            waiting.start()
            while httpx.get(f"{url}/load").json() != {"server_load": 3}:
                pass
            engine.kill()
            since = time.monotonic()
            for stream in streams:
                *_, error, done = stream
                assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
                assert done == "data: [DONE]"
            waiting.join()
        assert time.monotonic() - since < 5
        assert plain[0].status_code == 503
        assert "SIGKILL" in plain[0].json()["error"]["message"]
        with contextlib.suppress(httpx.TransportError):  # it may as well have ended
            assert httpx.get(f"{url}/health").status_code == 503
            assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        server.end()
        assert_gone([front, engine], temporary=tmp_path, url=url)


@pytest.mark.parametrize(
    ("loaded", "to_group", "times"), [(False, False, 1), (True, True, 1), (True, False, 2)]
)
def test_js_171_an_interrupt_ends_all(folder, tmp_path, loaded, to_group, times) -> None:
    patience = "0.3" if times == 1 else "60"
    flags = ("--port", 0, "--shutdown-timeout", patience, *FAKE)
    with program(MODEL, *flags, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url, family = server.url, server.family()
        with contextlib.ExitStack() as stack:
            streams = [open_stream(stack, url) for _ in range(2 * loaded)]
            for _ in range(times):
                (os.killpg if to_group else os.kill)(server.process.pid, signal.SIGINT)
                server.wait_for("Stopping")
            for stream in streams:
                *_, last, done = stream
                assert '"finish_reason":"abort"' in last
                assert done == "data: [DONE]"
        assert server.end() in (0, 130)
        assert "Traceback" not in server.output
        assert_gone(family, temporary=tmp_path, url=url)


def test_js_173_open_streams_do_not_keep_it_alive(folder, tmp_path) -> None:
    assert ServerSettings().shutdown_timeout <= 8
    flags = ("--port", 0, "--shutdown-timeout", 0.5, *FAKE)
    with program(MODEL, *flags, cwd=folder, TMPDIR=str(tmp_path)) as server:
        url, family = server.url, server.family()
        port = httpx.URL(url).port
        raw = json.dumps({**ENDLESS, "stream": True, "n": 20}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with contextlib.ExitStack() as stack:
            # Two do not read, of which one has a small buffer that is soon full.
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
            assert server.end() == 0
        assert_gone(family, temporary=tmp_path, url=url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["", "starting", "load weights", "compile"])
def test_js_174_a_signal_while_it_starts(rand, settings, tmp_path, phase, number) -> None:
    """With a real engine; in the first phase it has not come further than its imports."""
    flags = ("--model", rand, "--port", 0, "--max-num-seqs", 8, "--dtype", "float32")
    with program(*flags, "--compilation-cache-dir", "", TMPDIR=str(tmp_path)) as server:
        if phase:
            server.wait_for(phase)
        else:
            server.wait_for_imports()
        family = server.family()
        server.process.send_signal(number)
        assert server.end() in (128 + number, -number)
        assert "Traceback" not in server.output
        assert len(server.output.splitlines()) < 12
        assert_gone(family, temporary=tmp_path)


def test_js_174_a_signal_while_the_first_request_is_compiled(rand, tmp_path) -> None:
    flags = ("--model", rand, "--port", 0, "--no-warmup", "--shutdown-timeout", 0.2)
    with program(*flags, "--compilation-cache-dir", "", TMPDIR=str(tmp_path)) as server:
        url, family = server.url, server.family()
        with contextlib.ExitStack() as stack:
            ended = stack.enter_context(contextlib.closing(httpx.Client(timeout=60)))
            request = threading.Thread(target=lambda: ended.post(url + COMPLETIONS, json=BODY))
            request.start()
            while httpx.get(f"{url}/load").json() != {"server_load": 1}:
                pass
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
            request.join()
        assert "Traceback" not in server.output
        assert_gone(family, temporary=tmp_path, url=url)


def test_js_175_a_port_that_is_taken(rand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with program("--model", rand, "--port", port) as server:
            assert server.end() == 1
    assert str(port) in server.output
    assert server.output.startswith("error: ")
    assert len(server.output.splitlines()) == 1


def test_js_176_servers_do_not_meet(folder, tmp_path) -> None:
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
        engines = {server.family()[1].pid for server in servers}
        assert len(engines) == 4


@pytest.fixture(scope="module")
def cramped(folder, tmp_path_factory):
    """A server with few open files, a long TMPDIR with sockets of others, and a long model path."""
    temporary = tmp_path_factory.mktemp("t") / ("t" * 120)
    (temporary / "jaxserve-old").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        os.chdir(temporary)
        left.bind("jaxserve-old/events")
        os.chdir(ROOT)
    deep = folder / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (deep / "model").symlink_to(folder / MODEL)
    flags = ("--model", deep / "model", "--port", 0, *FAKE)
    with program(*flags, soft_files=256, TMPDIR=str(temporary)) as server:
        yield server


def test_js_177_sockets_where_paths_are_long(cramped) -> None:
    reply = httpx.post(cramped.url + COMPLETIONS, json={**BODY, "max_tokens": 3}).json()
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["model"] == "model"


@pytest.mark.parametrize("name", ["t" * 120, "\u4e2d" * 40, "missing/folder", "short"])
def test_js_177_the_folder_of_sockets(tmp_path, monkeypatch, name) -> None:
    if name != "missing/folder":
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = SocketFolder()
    try:
        for address in (folder.events, folder.requests(999)):
            path = Path(address.removeprefix("ipc://"))
            assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
    assert not Path(folder.path).exists()


async def test_js_178_more_connections_than_the_soft_limit_of_files(cramped) -> None:
    url = httpx.URL(cramped.url)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    raw = json.dumps({**BODY, "max_tokens": 5, "stream": True}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode()
    before = [process.num_fds() for process in cramped.family()]
    everybody = asyncio.Event()
    connected = 0

    async def stream():
        nonlocal connected
        reader, writer = await asyncio.open_connection(url.host, url.port)
        connected += 1
        if connected == 600:
            everybody.set()
        await everybody.wait()
        writer.write(head + raw)
        reply = await reader.read()
        writer.close()
        return reply

    try:
        async with asyncio.timeout(TIMEOUT_S):
            replies = await asyncio.gather(*(stream() for _ in range(600)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for reply in replies:
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert b"data: [DONE]" in reply
    front, engine = cramped.family()
    assert engine.num_fds() <= before[1] + 4
    assert front.is_running()

"""Clients that stop reading or vanish are disconnected; slow ones are not."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import ConfigError
from jaxserve.testing.waiting import until
from server.http_server import HttpServer
from server.serving import http_server
from server.settings import ServerSettings
from server.sse import chunk_writer
from server.write_watch import WriteWatch, probe_peer

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = 32 * 2**20


class FakeLoop:
    """An event loop with one timer and a clock that `advance` moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> "FakeLoop":
        assert self.timer is None
        self.timer = (self.now + delay, callback)
        return self

    def cancel(self) -> None:
        self.timer = None

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timer is not None and self.timer[0] <= end:
            self.now, callback = self.timer
            self.timer = None
            callback()
        self.now = end


class FakeTransport:
    """A transport that sends when `send` is called."""

    def __init__(self) -> None:
        self.unsent = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.unsent += len(data)

    def send(self, num_bytes: int) -> None:
        self.unsent -= num_bytes

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def watched() -> tuple[WriteWatch, FakeTransport, FakeLoop]:
    transport, loop = FakeTransport(), FakeLoop()
    return WriteWatch(transport, loop, timeout_s=60), transport, loop  # type: ignore[arg-type]


def test_nothing_is_written_after_the_connection_is_lost(watched) -> None:
    watch, transport, loop = watched
    watch.write(b"x")
    watch.stop()
    watch.write(b"x" * 100)
    assert transport.unsent == 1
    loop.advance(1000)
    assert not transport.aborted


def test_a_client_that_reads_nothing_is_disconnected_after_the_timeout(watched) -> None:
    watch, transport, loop = watched
    watch.write(b"x" * 100)
    loop.advance(59)
    assert not transport.aborted
    loop.advance(16)
    assert transport.aborted
    assert loop.timer is None


def test_writing_more_is_no_progress(watched) -> None:
    watch, transport, loop = watched
    for _ in range(75):
        watch.write(b"x" * 100)
        loop.advance(1)
    assert transport.aborted


def test_a_byte_in_time_is_progress_even_if_more_bytes_wait(watched) -> None:
    watch, transport, loop = watched
    for _ in range(20):
        watch.write(b"x" * 100)
        transport.send(1)
        loop.advance(45)
    assert not transport.aborted
    loop.advance(75)
    assert transport.aborted


def test_an_idle_connection_has_no_timer(watched) -> None:
    watch, transport, loop = watched
    watch.write(b"x" * 100)
    transport.send(100)
    loop.advance(1000)
    assert loop.timer is None
    watch.write(b"x")  # the time before it does not count
    loop.advance(59)
    assert not transport.aborted
    watch.stop()
    loop.advance(1000)
    assert not transport.aborted


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, write_timeout: float) -> AsyncIterator[tuple[int, HttpServer]]:
    """Serves an application, and yields its port and the server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        settings = ServerSettings(write_timeout=write_timeout)
        server = http_server(app, settings)  # type: ignore[arg-type]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = True
            await task


def stalled_client(port: int) -> socket.socket:
    """Returns a connection with a small receive buffer that has sent a request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(GET)
    return client


ends: list[str] = []


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends chunks through the extension until the client disconnects."""

    async def write_all() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        write = chunk_writer(scope, send)
        while True:
            await write(b"x" * 2**16)

    await receive()
    writing = asyncio.create_task(write_all())
    ends.append((await receive())["type"])
    writing.cancel()


async def messages(scope: Scope, receive: Receive, send: Send) -> None:
    """The same with ASGI messages."""
    await stream({**scope, "extensions": {}}, receive, send)


BAD_KEY = Response(b"x" * LARGE, 401, {"connection": "close"})


@pytest.mark.parametrize(
    "app",
    [stream, messages, Response(b"x" * LARGE), BAD_KEY],
    ids=["chunks", "messages", "whole", "closing"],
)
async def test_a_client_that_stops_reading_is_disconnected(app) -> None:
    ends.clear()
    async with serving(app, 0.2) as (port, server), asyncio.timeout(60):
        with stalled_client(port) as client:
            await until(lambda: server.server_state.connections)
            await until(lambda: not server.server_state.connections)
            client.settimeout(20)
            received = 0
            with contextlib.suppress(ConnectionError):
                while data := client.recv(2**20):
                    received += len(data)
            assert received < LARGE
    if app in (stream, messages):
        assert ends == ["http.disconnect"]


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with serving(Response(b"x" * LARGE), 1.0) as (port, _), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**14)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(LARGE // 2**20):
            await reader.readexactly(2**20)
            await asyncio.sleep(0.05)  # together longer than the timeout
        writer.close()


def test_the_timeout_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="--write-timeout"):
        ServerSettings(write_timeout=0)


async def test_accepted_connections_probe_their_peers() -> None:
    async with serving(Response(), 300) as (port, server), asyncio.timeout(60):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: server.server_state.connections)
        (connection,) = server.server_state.connections
        sock = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name, value in (
            *(("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)),
            ("TCP_USER_TIMEOUT", 300_000),
        ):
            if hasattr(socket, name):
                assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
        writer.close()


async def test_unix_sockets_have_no_probes() -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return first if name == "socket" else default

    first, second = socket.socketpair()
    probe_peer(Transport(), send_timeout_s=60)
    assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    first.close()
    second.close()

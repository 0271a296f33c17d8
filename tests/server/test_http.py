"""Bad connections: endless heads, unread bodies, invalid HTTP, upgrades, stalled readers."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import server.http
from jaxserve.testing.waiting import until
from server.http import MAX_HEAD_BYTES, MAX_QUEUED, PIECE_BYTES, HttpProtocol
from server.http_server import HttpServer


@contextlib.asynccontextmanager
async def serving(
    keep_alive_s: float = 60, app: ASGIApp | None = None, write_timeout_s: float = 60
) -> AsyncIterator[int]:
    """Serves an application, by default one with empty replies, and yields its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(
            app or Response(),
            http=partial(HttpProtocol, write_timeout_s=write_timeout_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        )
        server = HttpServer(config, last_bytes_s=0.1)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_an_incomplete_head_closes_the_connection(begin) -> None:
    async with serving(keep_alive_s=0.1) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        assert await reader.read() == b""
        writer.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Replies with the body of the request."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await Response(body)(scope, receive, send)


def head_of(num_bytes: int, first: bytes = b"GET / HTTP/1.1\r\nhost: x\r\n") -> bytes:
    """Returns a complete head of ``num_bytes`` bytes."""
    start, end = first + b"x: ", b"\r\n\r\n"
    return start + b"y" * (num_bytes - len(start) - len(end)) + end


async def exchange(port: int, *parts: bytes) -> bytes:
    """Sends ``parts`` and returns all that the server sends until it closes the connection.

    Each part is in the socket of the server before the server can read.
    """
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        for part in parts:
            assert connection.send(part) == len(part)
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(ConnectionError):
            reply = await reader.read()
        writer.close()
        return reply


def statuses(replies: bytes) -> list[int]:
    return [int(part[:3]) for part in replies.split(b"HTTP/1.1 ")[1:]]


def error_in(reply: bytes) -> dict[str, object]:
    """Returns the error in the last reply."""
    head, _, body = reply.rpartition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    return json.loads(body)["error"]


@pytest.mark.parametrize("step", [MAX_HEAD_BYTES * 4, 5000])
@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nhost: x\r\n", b"GET /" + b"z" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n"],
)
async def test_the_size_of_a_head_is_limited(begin, step) -> None:
    async with serving(keep_alive_s=60) as port, asyncio.timeout(60):
        for size, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)):
            head = head_of(size, begin + b"connection: close\r\n")
            parts = [head[i : i + step] for i in range(0, size, step)]
            reply = await exchange(port, *parts)
            assert statuses(reply) == [status]
        error = error_in(reply)
        assert (error["type"], error["code"]) == ("RequestTooLargeError", 431)
        assert str(MAX_HEAD_BYTES) in str(error["message"])


@pytest.mark.parametrize("padding", [b"x: " + b" " * 70_000 + b"y", b"x: y\r\n" * 12_000])
async def test_spaces_and_short_headers_count_towards_the_size_of_a_head(padding) -> None:
    async with serving(keep_alive_s=60) as port, asyncio.timeout(60):
        reply = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\n" + padding + b"\r\n\r\n")
        assert statuses(reply) == [431]
        assert statuses(await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\n" + padding)) == [431]


async def test_the_head_of_a_second_request_is_limited() -> None:
    before = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"
    async with serving(keep_alive_s=60) as port, asyncio.timeout(60):
        for size, num_replies in ((MAX_HEAD_BYTES, 2), (MAX_HEAD_BYTES + PIECE_BYTES, 1)):
            head = head_of(size, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
            assert statuses(await exchange(port, before + head)) == [200] * num_replies
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for size, status in ((MAX_HEAD_BYTES, b"200"), (MAX_HEAD_BYTES + 1, b"431")):
            writer.write(before)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head_of(size))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 " + status)
        writer.close()


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("rest", [b"0\r\n" + b"a: b\r\n" * 20_000, b"5;" + b"x" * 100_000])
async def test_chunk_extensions_and_trailers_are_limited(rest) -> None:
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        ends.append(message["type"])

    async with serving(keep_alive_s=60, app=app) as port, asyncio.timeout(60):
        assert statuses(await exchange(port, CHUNKED, rest)) == [431]
    assert ends == ["http.disconnect"]


async def test_a_body_may_have_many_chunks() -> None:
    parts = b"1\r\nx\r\n" * 20_000 + b"0\r\na: b\r\n\r\n"
    async with serving(keep_alive_s=60, app=echo) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + parts)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(20_000) == b"x" * 20_000
        writer.close()


BODY_BYTES = 30_000_000


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("closes", [False, True])
async def test_a_client_that_reads_after_sending_its_body_gets_an_early_reply(
    closes, is_chunked
) -> None:
    headers = {"connection": "close"} if closes else {}
    app = Response(b"no", 413, headers)

    def post_twice(port: int) -> list[tuple[int, bytes]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        replies = []
        for _ in range(2):
            body = [b" " * 100_000] * (BODY_BYTES // 100_000) if is_chunked else b" " * BODY_BYTES
            connection.request("POST", "/", body, encode_chunked=is_chunked)
            reply = connection.getresponse()
            replies.append((reply.status, reply.read()))
        connection.close()
        return replies

    async with serving(keep_alive_s=60, app=app) as port, asyncio.timeout(60):
        assert await asyncio.to_thread(post_twice, port) == [(413, b"no")] * 2


async def write_forever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("closes", [False, True])
async def test_the_unread_rest_of_a_request_has_a_size_limit(closes, monkeypatch) -> None:
    monkeypatch.setattr(server.http, "MAX_UNREAD_BYTES", 100_000)
    app = Response(headers={"connection": "close"} if closes else {})
    async with serving(keep_alive_s=60, app=app) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(ConnectionError):
            await write_forever(writer, b" " * 50_000)
        writer.close()


@pytest.mark.parametrize("closes", [False, True])
async def test_the_unread_rest_of_a_request_has_a_time_limit(closes, monkeypatch) -> None:
    monkeypatch.setattr(server.http, "UNREAD_TIMEOUT_S", 0.1)
    app = Response(headers={"connection": "close"} if closes else {})
    async with serving(keep_alive_s=60, app=app) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        await reader.read()
        with pytest.raises(ConnectionError):
            await write_forever(writer, b" ")
        writer.close()


TO_UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    [
        *(b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"),
        *(b"GET / HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        *(b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"),
        CHUNKED + b"zz\r\n",
        *(b"GET http://a:99999/ HTTP/1.1\r\nhost: a\r\n" + more for more in (b"\r\n", TO_UPGRADE)),
    ],
)
async def test_invalid_http_gets_a_standard_error(begin, caplog) -> None:
    async with serving(keep_alive_s=60, app=echo) as port, asyncio.timeout(60):
        reply = await exchange(port, begin, b"and more\r\n" * 5000)
        assert statuses(reply) == [400]
        error = error_in(reply)
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert "request" in str(error["message"]).lower() or "CONNECT" in str(error["message"])
    assert not caplog.records


async def test_requests_before_invalid_http_get_replies() -> None:
    good = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
    async with serving(keep_alive_s=60, app=echo) as port, asyncio.timeout(60):
        reply = await exchange(port, good + b"one!" + good + b"two!" + b"%" * 200_000)
        assert statuses(reply) == [200, 200]
        assert reply.index(b"one!") < reply.index(b"two!")


WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"


@pytest.mark.parametrize("upgrade", [WEBSOCKET, H2C])
async def test_upgrades_to_another_protocol_are_ignored(upgrade, caplog) -> None:
    post = b"POST / HTTP/1.1\r\nhost: x\r\n" + upgrade
    requests = [
        post + b"content-length: 4\r\n\r\nbody",
        post + b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    ]
    async with serving(keep_alive_s=60, app=echo) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            for cut in range(len(request) - 30, len(request) + 1, 2):
                writer.write(request[:cut])
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(request[cut:])
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(4) == b"body"
        writer.write(b"".join(requests))
        for _ in requests:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(4) == b"body"
        writer.close()
    assert not caplog.records


async def test_line_breaks_do_not_keep_a_connection_alive() -> None:
    async with serving(keep_alive_s=0.2) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_serves_more_than_one_request() -> None:
    async with serving(keep_alive_s=60) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_shutdown_disconnects_a_client_that_does_not_read(caplog) -> None:
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def stream() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})

        await receive()
        streaming = asyncio.create_task(stream())
        ends.append((await receive())["type"])
        streaming.cancel()

    async with asyncio.timeout(60), serving(keep_alive_s=60, app=app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert ends == ["http.disconnect"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    writer.close()


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Held:
    """An application whose replies wait for ``release``, and that notes who leaves before."""

    def __init__(self) -> None:
        self.num_begun = self.num_left = 0
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        while (await receive())["type"] == "http.request":
            leaving = asyncio.create_task(receive())
            releasing = asyncio.create_task(self.release.wait())
            await asyncio.wait([leaving, releasing], return_when=asyncio.FIRST_COMPLETED)
            releasing.cancel()
            if not leaving.done():
                leaving.cancel()
                await Response(b"held")(scope, receive, send)
                return
            assert (await leaving)["type"] == "http.disconnect"
            self.num_left += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"nobody reads it"})
            return


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize(
    "queued", [b"", GET, 5 * GET, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234"]
)
async def test_a_client_that_leaves_is_noticed_whatever_it_has_queued(
    queued, abort, caplog
) -> None:
    app = Held()
    async with serving(app=app) as port, asyncio.timeout(60):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + queued)
        await until(lambda: app.num_begun == 1)
        if abort:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: app.num_left == 1)
    assert app.num_begun == 1, "a request began after its client had left"
    assert not caplog.records


async def test_queued_requests_are_served_in_order_up_to_a_limit() -> None:
    app = Held()
    async with serving(app=app) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + MAX_QUEUED * GET)
        await until(lambda: app.num_begun == 1)
        app.release.set()
        for _ in range(1 + MAX_QUEUED):
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == b"held"
        assert app.num_begun == 1 + MAX_QUEUED
        app.release.clear()
        writer.write(100_000 * GET)  # on the same connection
        await until(lambda: app.num_begun == 2 + MAX_QUEUED)
        app.release.set()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1 + MAX_QUEUED
        assert app.num_begun == 2 * (1 + MAX_QUEUED)
        writer.close()

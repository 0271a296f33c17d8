"""HTTP/1.0 gets streams without chunks, and HTTP/1.1 must have exactly one Host."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.sse import chunk_writer
from server.testing import serving

PARTS = [b"one", b"", b"two" * 40_000, b"three"]


async def fetch(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Returns the head and the rest of what the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), body


async def with_extension(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    write = chunk_writer(scope, send)
    for part in PARTS:
        if part:
            await write(part)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def with_messages(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in [*PARTS, b"end"]:
            yield part

    await StreamingResponse(parts())(scope, receive, send)


@pytest.mark.parametrize("app", [with_extension, with_messages])
@pytest.mark.parametrize("host", [b"", b"host: x\r\n"])
@pytest.mark.parametrize("kept", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_to_http_1_0_ends_with_the_connection(app, host, kept) -> None:
    async with serving(app) as port, asyncio.timeout(60):
        head, body = await fetch(port, b"GET / HTTP/1.0\r\n" + host + kept + b"\r\n")
        assert head.startswith(b"http/1.1 200 ")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert b"connection: close" in head
        assert body == b"".join([*PARTS, b"end"])


async def test_whole_replies_and_heads_to_http_1_0_have_a_length() -> None:
    async with serving(Response(b"whole")) as port, asyncio.timeout(60):
        head, body = await fetch(port, b"GET / HTTP/1.0\r\n\r\n")
        assert b"content-length: 5" in head
        assert body == b"whole"
        head, body = await fetch(port, b"HEAD / HTTP/1.0\r\n\r\n")
        assert head.startswith(b"http/1.1 200 ")
        assert body == b""
    async with serving(with_messages) as port, asyncio.timeout(60):
        head, body = await fetch(port, b"HEAD / HTTP/1.0\r\n\r\n")
        assert head.startswith(b"http/1.1 200 ")
        assert body == b""


async def test_an_empty_stream_to_http_1_0_is_empty() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        for part in ():
            yield part

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(nothing())(scope, receive, send)

    async with serving(app) as port, asyncio.timeout(60):
        head, body = await fetch(port, b"GET / HTTP/1.0\r\n\r\n")
        assert head.startswith(b"http/1.1 200 ")
        assert body == b""


UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"


@pytest.mark.parametrize(
    ("head", "count"),
    [
        (b"GET / HTTP/1.1\r\n", 0),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n", 2),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\nHost: b\r\n", 2),
        (b"GET http://a/ HTTP/1.1\r\nhost: a\r\nHOST:\r\n", 2),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n", 2),
        (b"GET / HTTP/1.1\r\n" + UPGRADE, 0),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n" + UPGRADE, 2),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\nhost: a\r\nhost: b\r\n", 2),
    ],
)
async def test_a_request_without_exactly_one_host_is_refused(head, count) -> None:
    calls: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope["path"])
        await Response()(scope, receive, send)

    async with serving(app) as port, asyncio.timeout(60):
        reply, body = await fetch(port, head + b"\r\nhello")
        assert reply.startswith(b"http/1.1 400 ")
        error = json.loads(body)["error"]
        assert error["message"] == f"the request must have one Host header, got {count}"
        assert calls == []
        good = b"GET /first HTTP/1.1\r\nhost:\r\n\r\n"
        reply, _ = await fetch(port, good + head + b"\r\nhello")
        assert reply.startswith(b"http/1.1 200 "), "an earlier request gets its response"
        assert calls == ["/first"]

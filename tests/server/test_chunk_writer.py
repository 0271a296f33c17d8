"""Chunks of a response body, written through the ASGI extension and as ASGI messages."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.sse import EXTENSION, WriteChunk, chunk_writer
from server.testing import serving

GET = b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def streaming(write_body: Callable[[WriteChunk], Awaitable[None]]) -> ASGIApp:
    """Returns an application whose body ``write_body`` writes; /messages uses ASGI messages."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/messages":
            del scope["extensions"][EXTENSION]
        else:
            assert EXTENSION in scope["extensions"]
        await write_body(chunk_writer(scope, send))
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    return app


async def test_the_extension_and_asgi_messages_send_the_same_bytes() -> None:
    async def write_body(write: WriteChunk) -> None:
        for size in (1, 15, 16, 17, 300, 70_000):
            await write(bytes([size % 256]) * size)
            await asyncio.sleep(0)

    async def get(path: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % path)
        reply = await reader.read()
        writer.close()
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        return body

    async with asyncio.timeout(60), serving(streaming(write_body)) as port:
        body = await get(b"/")
        assert body == await get(b"/messages")
    assert len(body) > 70_000
    assert body.endswith(b"3\r\nend\r\n0\r\n\r\n")


async def test_writing_waits_for_a_client_that_does_not_read() -> None:
    num_bytes = 0
    is_blocked = asyncio.Event()

    async def write_body(write: WriteChunk) -> None:
        nonlocal num_bytes
        for _ in range(64):
            writing = asyncio.ensure_future(write(b"x" * 2**20))
            done, _ = await asyncio.wait({writing}, timeout=0.2)
            if not done:
                is_blocked.set()
            await writing
            num_bytes += 2**20

    async with asyncio.timeout(60), serving(streaming(write_body)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(GET % b"/")
        await is_blocked.wait()
        assert num_bytes < 32 * 2**20
        body = await reader.read()
        assert len(body) > 64 * 2**20
        writer.close()


async def test_writing_after_a_disconnect_has_no_effect(caplog) -> None:
    has_disconnected, has_finished = asyncio.Event(), asyncio.Event()

    async def write_body(write: WriteChunk) -> None:
        await write(b"first")
        await has_disconnected.wait()
        for _ in range(64):
            await write(b"x" * 2**20)
            await asyncio.sleep(0)
        has_finished.set()

    async with asyncio.timeout(60), serving(streaming(write_body)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"/")
        await reader.readuntil(b"first")
        writer.close()
        await writer.wait_closed()
        has_disconnected.set()
        await has_finished.wait()
    assert not caplog.records

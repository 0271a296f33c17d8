"""Heads of requests that do not end, in bytes or in time, and clients that do not read."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http import MAX_HEAD_BYTES, HttpProtocol, HttpServer


@contextlib.asynccontextmanager
async def serving(keep_alive_s: float, app: ASGIApp | None = None) -> AsyncIterator[int]:
    """Serves an empty reply to everything, or an application; gives the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(
            app or Response(),
            http=HttpProtocol,
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
async def test_a_head_that_does_not_come_closes_the_connection(begin) -> None:
    async with serving(keep_alive_s=0.1) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        assert await reader.read() == b""
        writer.close()


async def test_a_head_of_any_size_does_not() -> None:
    async with serving(keep_alive_s=60) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1000))
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_connection_serves_more_than_one_request() -> None:
    async with serving(keep_alive_s=60) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off_at_the_end(caplog) -> None:
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def pour() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})

        await receive()
        pouring = asyncio.create_task(pour())
        ends.append((await receive())["type"])
        pouring.cancel()

    async with asyncio.timeout(20), serving(keep_alive_s=60, app=app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert ends == ["http.disconnect"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    writer.close()

"""Replies to a request for text, whole or as server-sent events, while somebody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import logger, reply_to

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + _encode(data) + b"\n\n"


async def reply_whole(request: Request, body: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """Waits for a body and sends it. Raises ClientDisconnect if the client does not wait."""
    whole = await unless_gone(request.receive, body)
    return Response(_encode(whole), media_type="application/json")


async def reply_stream(request: Request, chunks: AsyncGenerator[msgspec.Struct, None]) -> Response:
    """Waits for the first chunk, so that an error before it is an error of the whole request."""
    first = await unless_gone(request.receive, anext(chunks))
    return EventStream(first, chunks)


class EventStream(Response):
    """Sends chunks as they come, then ``[DONE]``. An error on the way becomes an event.

    When the client goes away the generator is closed at once.
    """

    def __init__(self, first: msgspec.Struct, chunks: AsyncGenerator[msgspec.Struct, None]) -> None:
        super().__init__()
        self._first = first
        self._chunks = chunks
        self.raw_headers = HEADERS.copy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers.copy()}
        )
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                await send(_body(event(self._first)))
                async for chunk in chunks:
                    await send(_body(event(chunk)))
            except Exception as error:
                reply = reply_to(error)
                if reply.status == 500:
                    logger.exception("a stream was broken off")
                await send(_body(event(reply.body)))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    The body of the request must have been read. Raises ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

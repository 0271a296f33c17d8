"""Replies to a request for text, whole or as server-sent events, while somebody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.chunks import chunk_writer
from server.errors import logger, reply_to

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How values become events, and what ends a stream."""

    event: Callable[[msgspec.Struct], bytes]
    end: bytes


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + _encode(data) + b"\n\n"


def named_event(data: msgspec.Struct) -> bytes:
    """One with the ``type`` of the value as its name."""
    name = getattr(data, "type", "error")
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


PLAIN = Framing(event, DONE)
FRAMINGS = {"plain": PLAIN, "named": Framing(named_event, b"")}
"""The framings that `jaxserve.openai.endpoints.Endpoint.framing` names."""


async def reply_whole(request: Request, body: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """Waits for a body and sends it. Raises ClientDisconnect if the client does not wait."""
    whole = await unless_gone(request.receive, body)
    return Response(_encode(whole), media_type="application/json")


async def reply_stream(
    request: Request, chunks: AsyncGenerator[msgspec.Struct, None], *, framing: Framing = PLAIN
) -> Response:
    """Waits for the first chunk, so that an error before it is an error of the whole request."""
    first = await unless_gone(request.receive, anext(chunks))
    return EventStream(first, chunks, framing)


class EventStream(Response):
    """Sends chunks as they come, then the end. An error on the way becomes an event.

    When the client goes away the generator is closed at once.
    """

    def __init__(
        self,
        first: msgspec.Struct,
        chunks: AsyncGenerator[msgspec.Struct, None],
        framing: Framing = PLAIN,
    ) -> None:
        super().__init__()
        self._framing = framing
        self._first = first
        self._chunks = chunks
        self.raw_headers = HEADERS.copy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers.copy()}
        )
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ClientDisconnect:
            return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        event, write = self._framing.event, chunk_writer(scope, send)
        async with aclosing(self._chunks) as chunks:
            try:
                await write(event(self._first))
                async for chunk in chunks:
                    await write(event(chunk))
            except Exception as error:
                reply = reply_to(error)
                if reply.status == 500:
                    logger.exception("a stream was broken off")
                await write(event(reply.body))
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})


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

"""Replies to generating requests, whole or as server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.front.memory import FreedMemory
from jaxserve.openai.encoding import encode_pieces, fits
from jaxserve.openai.errors import error_reply, log_failure
from jaxserve.openai.json_lines import encode_line, escape_line_breaks
from server.errors import logger

T = TypeVar("T")
WriteChunk: TypeAlias = Callable[[bytes], Awaitable[None]]

EXTENSION = "jaxserve.write_chunk"
"""The ASGI extension by which a server offers a `WriteChunk`, under the key ``write``.

An ASGI message passes through every layer of the application and of its server, and each inspects
it. With one message for every token, that costs as much as generating the event.
"""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Framing:
    """The form of events, and the bytes that end a stream.

    Attributes:
      event: returns the whole event.
      head: returns what comes before the JSON, for events that are written in pieces.
      end: ends a stream.
    """

    event: Callable[[msgspec.Struct], bytes]
    head: Callable[[msgspec.Struct], bytes]
    end: bytes


def event(data: msgspec.Struct) -> bytes:
    """Returns one server-sent event with a JSON value."""
    return b"data: %b\n\n" % encode_line(data)


def named_event(data: msgspec.Struct) -> bytes:
    """Returns one server-sent event named after the ``type`` of its value."""
    return b"%b%b\n\n" % (_named_head(data), encode_line(data))


def _plain_head(data: msgspec.Struct) -> bytes:
    return b"data: "


def _named_head(data: msgspec.Struct) -> bytes:
    return b"event: " + getattr(data, "type", "error").encode() + b"\ndata: "


PLAIN = Framing(event, _plain_head, DONE)
FRAMINGS = {"plain": PLAIN, "named": Framing(named_event, _named_head, b"")}
"""The framings that `jaxserve.openai.endpoints.Endpoint.framing` names."""


async def reply_whole(
    request: Request, body: Coroutine[Any, Any, msgspec.Struct], memory: FreedMemory
) -> Response:
    """Awaits ``body`` and returns it as JSON.

    ``memory`` gives the memory of a large reply back when it has been sent.

    Raises:
      ClientDisconnect: the client disconnects.
    """
    whole = await unless_disconnected(request.receive, body)
    if fits(whole):
        return Response(_encode(whole), media_type="application/json")
    pieces = []
    for piece in encode_pieces(whole):
        pieces.append(piece)
        await asyncio.sleep(0)  # other requests continue between the pieces
    return LargeReply(pieces, memory)


class LargeReply(Response):
    """Sends a JSON reply in pieces. A piece that has been sent takes no memory."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], memory: FreedMemory) -> None:
        self._size = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(self._size)})
        self._pieces = pieces
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers.copy()}
        )
        self._pieces.reverse()
        try:
            while self._pieces:
                await _send_message(send, self._pieces.pop())
                await asyncio.sleep(0)  # sending does not wait for a client that reads fast enough
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._pieces.clear()
            self._memory.after(self._size)


async def reply_stream(
    request: Request,
    chunks: AsyncGenerator[msgspec.Struct, None],
    memory: FreedMemory,
    *,
    framing: Framing = PLAIN,
) -> Response:
    """Returns a stream once its first chunk has arrived, so that earlier errors set the status.

    ``memory`` gives the memory of large events back when they have been sent.

    Raises:
      ClientDisconnect: the client disconnects before the first chunk.
    """
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStream(first, chunks, memory, framing)


class EventStream(Response):
    """Sends chunks as they are generated, then the end of the stream.

    An error in between is sent as an event. When the client disconnects, the generator is closed
    at once.
    """

    def __init__(
        self,
        first: msgspec.Struct,
        chunks: AsyncGenerator[msgspec.Struct, None],
        memory: FreedMemory,
        framing: Framing = PLAIN,
    ) -> None:
        super().__init__()
        self._memory = memory
        self._framing = framing
        self._first = first
        self._chunks = chunks
        self.raw_headers = HEADERS.copy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers.copy()}
        )
        try:
            await unless_disconnected(receive, self._send_all(scope, send))
        except ClientDisconnect:
            return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        event, write = self._framing.event, chunk_writer(scope, send)
        async with aclosing(self._chunks) as chunks:
            try:
                await self._write_event(write, self._first)
                async for chunk in chunks:
                    if _is_small(chunk):
                        await write(event(chunk))
                    else:
                        await self._write_event(write, chunk)
            except Exception as error:
                log_failure(logger, "a stream failed", error)
                await write(event(error_reply(error).body))
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})

    async def _write_event(self, write: WriteChunk, data: msgspec.Struct) -> None:
        """Writes an event of any size."""
        if fits(data):
            await write(self._framing.event(data))
            return
        await write(self._framing.head(data))
        size = 0
        try:
            for piece in encode_pieces(data):
                size += len(piece)
                await write(escape_line_breaks(piece))
                await asyncio.sleep(0)  # other requests continue between the pieces
        finally:
            self._memory.after(size)
        await write(b"\n\n")


def _is_small(data: msgspec.Struct) -> bool:
    """Returns True for most events: chunks without log probabilities. Faster than `fits`."""
    choices = getattr(data, "choices", ())
    return len(choices) == 1 and choices[0].logprobs is None


def chunk_writer(scope: Scope, send: Send) -> WriteChunk:
    """Returns a function that sends a chunk of a body whose head had no ``content-length``.

    The function waits while the client is slow to read. It uses `EXTENSION` where the server
    offers it, else ASGI messages. End the body with ``send``.
    """
    offered = scope.get("extensions", {}).get(EXTENSION)
    return partial(_send_message, send) if offered is None else offered["write"]


async def _send_message(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of ``work``, which is cancelled when the client disconnects.

    The body of the request must have been read. Raises ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        disconnected.cancel()
        working.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)
        # An error refers to this frame. Without the tasks, which refer to the error, it is freed at
        # once, and with it the request.
        del working, disconnected


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""A short way for the pieces of a streamed body, from the application to its connection.

A piece that goes out as an ASGI message passes every layer of the application and of its server,
each of which looks at it. With a piece for every token that costs as much as making the piece.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WriteChunk: TypeAlias = Callable[[bytes], Awaitable[None]]

EXTENSION = "jaxserve.write_chunk"
"""The extension of ASGI by which a server offers a `WriteChunk`, as ``write``."""


def chunk_writer(scope: Scope, send: Send) -> WriteChunk:
    """What sends a piece of a body whose head has been sent, and has told no length.

    Waits while the client is slow to read. The end of the body is to be sent with ``send``.
    """
    offered = scope.get("extensions", {}).get(EXTENSION)
    return partial(_send_message, send) if offered is None else offered["write"]


async def _send_message(send: Send, data: bytes) -> None:
    """As any server understands it."""
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def write_chunk(cycle: RequestResponseCycle, data: bytes) -> None:
    """What uvicorn does with such a message."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

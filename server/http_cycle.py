"""The output of uvicorn's request cycles: chunks, and bodies that end with the connection."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


@dataclass(frozen=True, slots=True)
class CycleTransport:
    """The part of a transport that a cycle uses. Its functions are those of the protocol."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


async def write_part(cycle: RequestResponseCycle, data: bytes, *, as_chunk: bool) -> None:
    """Writes a part of a body as uvicorn would for an ASGI message. See `server.sse.EXTENSION`."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if as_chunk else data)


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Makes a body without a ``content-length`` end with the connection, as HTTP/1.0 requires.

    uvicorn sends such a body in chunks, whatever the version. Without chunks it counts the bytes;
    here it expects as many as there can be, and at the end exactly those of the last part.
    """
    uvicorn_send = cycle.send

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            if b"content-length" not in names:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif cycle.expected_content_length > sys.maxsize // 2 and not message.get("more_body"):
            cycle.expected_content_length = len(message.get("body", b""))
        await uvicorn_send(message)

    cycle.keep_alive = False
    cycle.send = send

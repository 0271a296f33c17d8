"""uvicorn as we run it: signals are ours, and nothing on a connection is without bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from jaxserve.openai.errors import make_error
from server.errors import TYPES
from server.sse import WRITE_CHUNK

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. The parser itself would take any number of bytes."""

PIECE_BYTES = 16 * 1024
"""How much is parsed at once. A head that follows another request in the same read is counted from
the end of such a piece."""

MAX_UNREAD_BYTES = 64 * 1024 * 1024
UNREAD_TIMEOUT_S = 30
"""How much of a request is thrown away, and for how long, once it has been answered."""


class HttpServer(uvicorn.Server):
    """A server that leaves the signals to who runs it.

    Args:
      config: of uvicorn.
      last_bytes_s: how many seconds, once it is to end, clients have to read their last bytes.
    """

    def __init__(self, config: uvicorn.Config, *, last_bytes_s: float) -> None:
        super().__init__(config)
        self._last_bytes_s = last_bytes_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections; those whose clients do not read are cut off."""
        timer = asyncio.get_running_loop().call_later(self._last_bytes_s, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 on one connection, with bounds on what uvicorn would take without end.

    - A head has at most `MAX_HEAD_BYTES`, and so has what comes between parts of a body. It must
      come within the time that a connection may be idle.
    - A client that is answered before its whole request has come gets to read the answer: the rest
      is read and thrown away, within `MAX_UNREAD_BYTES` and `UNREAD_TIMEOUT_S`. To close at once
      would reset the connection, and the answer would be lost.
    - What is not HTTP gets an error like every other. Offers to speak another protocol are ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0  # since the last boundary: end of a head, body, end of a message
        self._saw_boundary = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_deaf = False  # what comes is thrown away, not parsed
        self._num_unread_bytes = 0
        self._unread_timer: asyncio.TimerHandle | None = None  # while the rest is thrown away

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends."""
        if self._unread_timer is not None:  # all has been said
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._is_deaf or self._unread_timer is not None:
            self._num_unread_bytes += len(data)
            if self._num_unread_bytes > MAX_UNREAD_BYTES:
                self.transport.close()
        start = 0
        while start < len(data) and not (self._is_deaf or self.transport.is_closing()):
            # No piece can hold the end of a head that is too large.
            room = min(PIECE_BYTES, MAX_HEAD_BYTES - self._num_head_bytes)
            if room == 0:
                self._refuse(431, f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
                return
            start += self._feed(data[start : start + room])

    def _feed(self, piece: bytes) -> int:
        """Parses bytes. Returns how many of them are done with."""
        num_bytes = len(piece)
        self._saw_boundary = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            num_bytes = offer.args[0]
            self._ignore_offer()
        except httptools.HttpParserCallbackError:
            self._refuse(400, "the target in the request line is not a path")
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not a request of HTTP/1.1: {error}")
        self._num_head_bytes = 0 if self._saw_boundary else self._num_head_bytes + num_bytes
        return num_bytes

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        """The head of a request has ended."""
        self._saw_boundary = True
        self._stop_head_timer()
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self.cycle.transport = _Outgoing(self, self.cycle)  # type: ignore[assignment]
        # The application has not begun: it runs in a task.
        self.scope["extensions"] = {WRITE_CHUNK: {"write": partial(write_chunk, self.cycle)}}

    def on_body(self, body: bytes) -> None:
        """A part of the body of a request."""
        self._saw_boundary = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has ended."""
        self._saw_boundary = True
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.cycle.more_body = False  # uvicorn leaves it as it was if the answer has been sent
        self._stop_unread_timer()

    def on_response_complete(self) -> None:
        """An answer has ended."""
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_unread_timer()
        super().on_response_complete()

    def close_after(self, cycle: RequestResponseCycle) -> None:
        """Closes the connection now that ``cycle`` has ended, the last one on it."""
        if cycle.response_complete and (cycle.more_body or self._is_deaf):
            self._hang_up()
        else:
            self.transport.close()

    def _ignore_offer(self) -> None:
        """Parses a head again as if it had not offered to go on in another protocol.

        The parser would take the body of such a request for that protocol.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(400, "CONNECT is for proxies, and this is none")
            return
        headers = [b": ".join(header) for header in self.headers if header[0] != b"upgrade"]
        first = b"%s %s HTTP/%s" % (method, self.url, version.encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([first, *headers, b"", b""]))

    def _refuse(self, status: int, message: str) -> None:
        """Answers what cannot be parsed, and closes the connection once nothing is in flight."""
        self._is_deaf = True
        self._stop_head_timer()
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._write_error(status, message)
            self._hang_up()
        elif cycle.response_complete:  # it is the rest of a request that has had its answer
            self._hang_up()
        elif not cycle.more_body:  # requests before it will be answered
            cycle.keep_alive = False
        elif cycle.response_started or self.pipeline:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
            self._write_error(status, message)
            self._hang_up()

    def _write_error(self, status: int, message: str) -> None:
        kind = TYPES.get(status, "BadRequestError")
        body = msgspec.json.encode(make_error(status, message, type=kind).body)
        headers = [
            *self.server_state.default_headers,
            (b"x-request-id", uuid.uuid4().hex.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in headers), b"\r\n"]
        self.transport.write(b"".join([*lines, body]))

    def _hang_up(self) -> None:
        """Says that nothing more will come, and lets the client finish what it is sending."""
        self._is_deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_unread_timer()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_unread_timer(self) -> None:
        self._stop_unread_timer()
        self._num_unread_bytes = 0
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self._give_up)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class _Outgoing:
    """What a cycle of uvicorn writes to: the transport, which is not closed too early."""

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        """The cycle wants the connection closed."""
        self._protocol.close_after(self._cycle)


async def write_chunk(cycle: RequestResponseCycle, data: bytes) -> None:
    """Writes a chunk as uvicorn writes the message of a body whose length is unknown."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

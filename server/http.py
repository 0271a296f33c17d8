"""uvicorn with limits on everything a connection can send, and without its signal handlers.

This module and `server.http_cycle` are the only ones that use the private HTTP classes of uvicorn
(``uvicorn.protocols.http.httptools_impl``). tests/server/test_uvicorn_internals.py lists what it
relies on, and pyproject.toml bounds the version.
"""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from jaxserve.openai.errors import make_error
from server.errors import TYPES
from server.http_cycle import CycleTransport, end_with_connection, write_part
from server.sse import EXTENSION
from server.write_watch import WriteWatch, probe_peer

MAX_HEAD_BYTES = 64 * 1024
"""Limit of the request line and headers together. The parser itself has no limit."""

PIECE_BYTES = 16 * 1024
"""Bytes parsed at once. If a head follows another request in the same piece, its bytes are counted
from the end of that piece."""

MAX_QUEUED = 32
"""The most requests of a connection that may wait for the response to an earlier one."""

MAX_UNREAD_BYTES = 64 * 1024 * 1024
UNREAD_TIMEOUT_S = 30
"""Limits in bytes and seconds on the rest of a request that is discarded after its response."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 on one connection, with limits where uvicorn has none.

    - A head, or the framing between two chunks of a body, has at most `MAX_HEAD_BYTES`. A head must
      arrive within the keep-alive timeout.
    - A client that reads nothing for ``write_timeout_s`` seconds, or that no longer exists, is
      disconnected.
    - A client that gets its response before it has sent the whole request can still read that
      response: the rest of the request is discarded, up to `MAX_UNREAD_BYTES` and
      `UNREAD_TIMEOUT_S`. Closing at once would reset the connection and lose the response.
    - At most `MAX_QUEUED` requests may wait behind another one. If the client leaves, that one is
      told, and the others do not begin.
    - Bytes that are not HTTP get a JSON error like any other. Offers to upgrade to another protocol
      are ignored.
    - A stream to a client of HTTP/1.0 has no chunks: it ends when the connection does.
    """

    def __init__(self, *args: Any, write_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout_s = write_timeout_s
        # Bytes since the last boundary: the end of a head, a piece of body, the end of a message.
        self._num_head_bytes = 0
        self._saw_boundary = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._discards_input = False  # received bytes are no longer parsed
        self._num_unread_bytes = 0
        self._running: RequestResponseCycle | None = None  # the latest that has begun
        # Set while the rest of a request is discarded.
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timeout of the first head."""
        super().connection_made(transport)
        probe_peer(transport, send_timeout_s=self._write_timeout_s)
        self._watch = WriteWatch(transport, self.loop, timeout_s=self._write_timeout_s)
        self.write = self._watch.write
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers of a closed connection, and tells the application that it is closed."""
        self._stop_head_timer()
        self._stop_unread_timer()
        self._watch.stop()
        self.pipeline.clear()
        # uvicorn tells the request that came last, which may not have begun.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes the connection now if it is idle, else after its response."""
        if self._unread_timer is not None:  # the response has been sent
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Parses received bytes in pieces, or discards them."""
        if self._discards_input or self._unread_timer is not None:
            self._num_unread_bytes += len(data)
            if self._num_unread_bytes > MAX_UNREAD_BYTES:
                self.transport.close()
        start = 0
        while start < len(data) and not (self._discards_input or self.transport.is_closing()):
            # A piece ends at the limit at the latest, so a head that is too large cannot end in it.
            size = min(PIECE_BYTES, MAX_HEAD_BYTES - self._num_head_bytes)
            if size == 0:
                self._reject(431, f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
                return
            start += self._parse(data[start : start + size])

    def _parse(self, piece: bytes) -> int:
        """Parses bytes. Returns how many of them have been consumed."""
        num_bytes = len(piece)
        self._saw_boundary = False
        try:
            num_bytes = self._feed(piece)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            is_known = isinstance(cause, _InvalidHeadError)
            self._reject(400, str(cause) if is_known else "the request target is not a valid path")
        except httptools.HttpParserError as error:
            self._reject(400, f"the request is not valid HTTP/1.1: {error}")
        self._num_head_bytes = 0 if self._saw_boundary else self._num_head_bytes + num_bytes
        return num_bytes

    def _feed(self, piece: bytes) -> int:
        """Gives bytes to the parser. Returns how many it has consumed. Raises HttpParserError."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            num_bytes = upgrade.args[0]
        else:
            return len(piece)
        # After the handler: inside of it, an error of a callback would lose its own context.
        self._ignore_upgrade()
        return num_bytes

    def on_message_begin(self) -> None:
        """Starts the timeout of a new head."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Starts the application once the head of a request is complete."""
        self._saw_boundary = True
        self._stop_head_timer()
        self._check_host()
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) == MAX_QUEUED:
            raise _InvalidHeadError(f"more than {MAX_QUEUED} requests wait for earlier responses")
        super().on_headers_complete()
        cycle = self.cycle
        if self.pipeline:
            # uvicorn would read no more, and not notice that the client leaves.
            self.flow.resume_reading()
        # The application runs in a task that has not started yet, so it sees these changes.
        cycle.transport = CycleTransport(  # type: ignore[assignment]
            self.write, self.transport.is_closing, partial(self.close_after, cycle)
        )
        has_chunks = self.parser.get_http_version() == "1.1"
        if not has_chunks:
            end_with_connection(cycle)
        write = partial(write_part, cycle, as_chunk=has_chunks)
        self.scope["extensions"] = {EXTENSION: {"write": write}}

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Receives a piece of the body of a request."""
        self._saw_boundary = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Marks a request as received completely."""
        self._saw_boundary = True
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.cycle.more_body = False  # uvicorn does not set it after the response
        self._stop_unread_timer()

    def on_response_complete(self) -> None:
        """Starts to discard the rest of a request that already has its response."""
        if self.cycle.response_complete:
            self.cycle.body = bytearray()  # what the application has not read
            if self.cycle.more_body:
                self._start_unread_timer()
        super().on_response_complete()

    def close_after(self, cycle: RequestResponseCycle) -> None:
        """Closes the connection after ``cycle``, the last one on it."""
        if cycle.response_complete and (cycle.more_body or self._discards_input):
            self._close_writing()
        else:
            self.transport.close()

    def _check_host(self) -> None:
        """Raises _InvalidHeadError unless there is one ``Host``; HTTP/1.0 can do without it."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise _InvalidHeadError(f"the request must have one Host header, got {num_hosts}")

    def _ignore_upgrade(self) -> None:
        """Parses a head again without its ``upgrade`` header.

        Otherwise the parser would treat the body of the request as bytes of the other protocol.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._reject(400, "CONNECT is not supported: this server is not a proxy")
            return
        headers = [b": ".join(header) for header in self.headers if header[0] != b"upgrade"]
        first = b"%s %s HTTP/%s" % (method, self.url, version.encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([first, *headers, b"", b""]))

    def _reject(self, status: int, message: str) -> None:
        """Responds to bytes that cannot be parsed. Closes the connection once it is idle."""
        self._discards_input = True
        self._stop_head_timer()
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._write_error(status, message)
            self._close_writing()
        elif cycle.response_complete:  # the bytes belong to a request that already has its response
            self._close_writing()
        elif not cycle.more_body:  # earlier requests still get their responses
            cycle.keep_alive = False
        elif cycle.response_started or self.pipeline:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
            self._write_error(status, message)
            self._close_writing()

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
        self.write(b"".join([*lines, body]))

    def _close_writing(self) -> None:
        """Closes our side, and discards what the client still sends."""
        self._discards_input = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_unread_timer()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_unread_timer(self) -> None:
        self._stop_unread_timer()
        self._num_unread_bytes = 0
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self._close)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class _InvalidHeadError(Exception):
    """A head is not valid HTTP in a way that the parser does not check."""

"""uvicorn as we run it: signals are ours, and the head of a request has a size limit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. The parser itself would take any number of bytes."""

TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


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
    """Closes a connection whose request has no end of its head.

    That is after `MAX_HEAD_BYTES`, or after the time that a connection may be idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        """The head of a request has ended."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

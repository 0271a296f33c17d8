"""uvicorn as a part of a program: it handles no signals, and ends in a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signal handling to its caller.

    Args:
      config: the configuration of uvicorn.
      last_bytes_s: seconds that clients get at shutdown to read their last bytes.

    Attributes:
      has_started: set as soon as `adopt` can be called.
    """

    def __init__(self, config: uvicorn.Config, *, last_bytes_s: float) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()
        self._last_bytes_s = last_bytes_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes all connections, and aborts those whose clients do not read in time."""
        timer = asyncio.get_running_loop().call_later(self._last_bytes_s, self._abort_connections)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    async def adopt(self, connection: socket.socket) -> None:
        """Serves a connection that has been accepted elsewhere. See ``has_started``."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has gone
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        """Returns a protocol as `uvicorn.Server.startup` makes them."""
        return self.config.http_protocol_class(
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,  # type: ignore[call-arg]
            app_state=self.lifespan.state,  # type: ignore[call-arg]
        )

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield

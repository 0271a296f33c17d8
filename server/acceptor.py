"""Accepts the connections of a server with several fronts, and hands each to one of them."""

from __future__ import annotations

import asyncio
import collections
import errno
import socket
from collections.abc import Sequence
from typing import Protocol

MAX_AT_ONCE = 64
"""The most connections that are accepted before other work of the main process has its turn."""

NO_FRONT_PAUSE_S = 0.02
"""Seconds until the next try when no front can take a connection."""

NO_DESCRIPTOR_PAUSE_S = 1.0
"""Seconds until the next try when the process has no descriptor left."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Takers(Protocol):
    """The fronts, as far as they take connections."""

    @property
    def can_take(self) -> bool:
        """Whether a front can take a connection now."""
        ...

    def hand(self, connection: socket.socket) -> bool:
        """Hands over a connection; returns False, and leaves it, if that is impossible."""
        ...


class Acceptor:
    """Accepts connections. Those that no front can take yet wait in the queue of the kernel.

    Args:
      listeners: non-blocking sockets that listen. `close` closes them.
      fronts: take the connections.
    """

    def __init__(self, listeners: Sequence[socket.socket], fronts: Takers) -> None:
        """Begins to accept. Needs a running event loop."""
        self._listeners = list(listeners)
        self._fronts = fronts
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.deque[socket.socket] = collections.deque()
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def hand_over(self, connections: Sequence[socket.socket]) -> None:
        """Hands connections to fronts as soon as these can take them."""
        self._waiting.extend(connections)
        self._hand_waiting()

    def close(self) -> None:
        """Closes the listeners, and the connections that wait. Idempotent."""
        self._stop_accepting()
        if self._pause is not None:
            self._pause.cancel()
        for each in (*self._listeners, *self._waiting):
            each.close()
        self._listeners.clear()
        self._waiting.clear()

    def _resume(self) -> None:
        self._pause = None
        self._hand_waiting()
        if self._pause is None:
            for listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _wait(self, seconds: float) -> None:
        """Accepts nothing for some seconds."""
        self._stop_accepting()
        if self._pause is None:
            self._pause = self._loop.call_later(seconds, self._resume)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_AT_ONCE):
            if not self._fronts.can_take:
                self._wait(NO_FRONT_PAUSE_S)
                return
            try:
                connection, _ = listener.accept()
            except OSError as error:
                # Anything else is about one connection, or there is none.
                if error.errno in NO_DESCRIPTOR:
                    self._wait(NO_DESCRIPTOR_PAUSE_S)
                return
            self.hand_over([connection])

    def _hand_waiting(self) -> None:
        while self._waiting:
            if not self._fronts.hand(self._waiting[0]):
                self._wait(NO_FRONT_PAUSE_S)
                return
            self._waiting.popleft()

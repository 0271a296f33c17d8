"""Hands accepted connections from the main process to a front process, over a Unix socket.

    main process                                      front process
    ConnectionSender ── one byte + descriptor ──────> ConnectionReceiver
                     <── one byte for each taken ──

The sender keeps a connection until the front has taken it. If the front ends first, another one can
have it, so only connections on which a front has begun to work break with it.
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket

BYTE = b"c"

MAX_UNTAKEN = 64
"""The most connections that a front has not taken yet. It takes one in less than a millisecond."""

STALL_S = 0.5
"""A front that leaves a connection untaken for this many seconds gets no more until it has taken
it."""


class ConnectionSender:
    """The end of the main process, which belongs to one front.

    Attributes:
      child_end: the socket that the front inherits. Close it once the front has been started.
    """

    def __init__(self) -> None:
        """Needs a running event loop."""
        self._socket, self.child_end = socket.socketpair()
        self._socket.setblocking(False)
        self._untaken: collections.deque[tuple[socket.socket, float]] = collections.deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_taken)

    @property
    def num_untaken(self) -> int:
        """Connections that were sent and that the front has not taken."""
        return len(self._untaken)

    @property
    def can_send(self) -> bool:
        """Whether the front should get another connection."""
        if not self._untaken:
            return True
        waits_s = self._loop.time() - self._untaken[0][1]
        return len(self._untaken) < MAX_UNTAKEN and waits_s < STALL_S

    def send(self, connection: socket.socket) -> bool:
        """Sends a connection; returns False, and leaves it to the caller, if that is impossible."""
        try:
            socket.send_fds(self._socket, [BYTE], [connection.fileno()])
        except OSError:  # the front has ended, or too many descriptors are in flight
            return False
        self._untaken.append((connection, self._loop.time()))
        return True

    def close(self) -> list[socket.socket]:
        """Closes the socket. Returns the connections that the front did not take. Idempotent.

        The front must have ended: a connection must not have two readers.
        """
        if self._socket.fileno() < 0:
            return []
        self._loop.remove_reader(self._socket)
        self._on_taken()
        self._socket.close()
        untaken = [connection for connection, _ in self._untaken]
        self._untaken.clear()
        return untaken

    def _on_taken(self) -> None:
        try:
            taken = self._socket.recv(MAX_UNTAKEN)
        except OSError:  # nothing was taken, or the front has been killed
            return
        if not taken:  # the front has ended: otherwise the loop would call this again and again
            self._loop.remove_reader(self._socket)
        for _ in taken:
            connection, _ = self._untaken.popleft()
            connection.close()


class ConnectionReceiver:
    """The end of the front process.

    Args:
      descriptor: the inherited socket.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)

    async def receive(self) -> socket.socket:
        """Waits for the next connection. Call `taken` once it has an owner.

        Raises:
          EOFError: the main process has ended.
        """
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, len(BYTE), 1)
            except BlockingIOError:
                await self._until_readable()
                continue
            if not data:
                raise EOFError("the main process has ended")
            if descriptors:
                connection = socket.socket(fileno=descriptors[0])
                connection.setblocking(False)
                return connection
            # This process has no descriptor left, so the kernel has closed its copy. The main
            # process closes the other one, as an event loop does with connections that it accepts.
            self.taken()

    def taken(self) -> None:
        """Tells the main process that the oldest connection which was received has an owner."""
        # At most `MAX_UNTAKEN` bytes wait in the socket, so there is always room.
        self._socket.send(BYTE)

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close()

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)

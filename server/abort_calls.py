"""Calls of `AbortRequests` over a control channel, and their replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from jaxserve.ipc.control import Aborted, AbortRequests


class AbortCalls:
    """The calls of one process to another.

    Args:
      send: sends a message to the other process.
      timeout_s: seconds after which a call without a reply returns 0; None waits for ever.
    """

    def __init__(
        self, send: Callable[[AbortRequests], None], *, timeout_s: float | None = None
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def abort(self, request_id: str | None) -> int:
        """Aborts requests in the other process; returns the number of completions."""
        number = next(self._numbers)
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._send(AbortRequests(number, request_id))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reply
        except TimeoutError:
            return 0
        finally:
            del self._waiting[number]

    def handle(self, reply: Aborted) -> None:
        """Ends the call that a reply belongs to, unless it has ended."""
        waiting = self._waiting.get(reply.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply.count)

    def close(self) -> None:
        """Ends all calls, because the other process has ended: they return 0."""
        for call in self._waiting:
            self.handle(Aborted(call, 0))

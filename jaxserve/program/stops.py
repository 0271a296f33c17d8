"""When a server has to stop, and how fast. Signals decide it, or the main process for a front."""

from __future__ import annotations

import asyncio
import enum
from typing import Any


class Haste(enum.IntEnum):
    """The haste of a program that stops: the time that requests in flight have. It only grows."""

    UNLIMITED = 0  # as long as they need
    LIMITED = 1  # as long as --shutdown-timeout says, from now on
    AT_ONCE = 2  # no time


class Stops:
    """The decisions so far. Needs a running event loop.

    Attributes:
      stop: set as soon as the server has to stop.
      limited: set as soon as requests have the shutdown timeout to finish.
      at_once: set as soon as requests have no time to finish.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        self.limited: asyncio.Future[None] = loop.create_future()
        self.at_once: asyncio.Future[None] = loop.create_future()

    @property
    def haste(self) -> Haste:
        """The haste with which a server that stops now has to do so.

        A server that stops although nobody said so, because it cannot go on, limits its requests.
        """
        if self.at_once.done():
            return Haste.AT_ONCE
        is_limited = self.limited.done() or not self.stop.done()
        return Haste.LIMITED if is_limited else Haste.UNLIMITED

    def decide(self, haste: Haste) -> None:
        """Decides that the server has to stop, at least with this haste."""
        decided = {
            self.stop: True,
            self.limited: haste >= Haste.LIMITED,
            self.at_once: haste >= Haste.AT_ONCE,
        }
        for future, is_decided in decided.items():
            if is_decided and not future.done():
                future.set_result(None)

    async def give_time(self, work: asyncio.Future[Any], timeout_s: float) -> None:
        """Waits until ``work`` is done, or until it may take no more time.

        ``timeout_s`` seconds begin when `limited` is set; or now, if nobody said to stop.
        """
        if self.stop.done():
            await asyncio.wait([work, self.limited], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(
            [work, self.at_once], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )

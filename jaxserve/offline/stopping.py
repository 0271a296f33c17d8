"""Stops a run of the batch program after a signal; see `jaxserve.program.signals`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from jaxserve.program.signals import StopSignals


class Stopping:
    """The state of a run that signals may stop.

    Attributes:
      on_finish: called when the run shall start no more requests.
      is_finishing: whether it has been called.
      is_cancelled: whether the run does not even finish the requests in flight.
    """

    def __init__(self) -> None:
        self.on_finish: Callable[[], None] = lambda: None
        self.is_finishing = False
        self.is_cancelled = False
        self._can_finish = False

    @contextlib.contextmanager
    def can_finish(self) -> Iterator[None]:
        """Says that requests may be in flight while the block runs."""
        self._can_finish = True
        try:
            yield
        finally:
            self._can_finish = False

    def finish(self) -> bool:
        """Starts no more requests. Returns False if there is nothing to finish."""
        if self._can_finish:
            self.is_finishing = True
            self.on_finish()
        return self._can_finish


async def until_stopped(
    run: Callable[[Stopping], Coroutine[Any, Any, None]],
) -> signal.Signals | None:
    """Runs ``run`` to its end, or until a signal stops it.

    Returns:
      The first signal, if there was one before the end.

    Raises:
      Exception: ``run`` raised it.
    """
    stopping = Stopping()
    with StopSignals(interrupt_kills=True) as signals:
        running = asyncio.create_task(run(stopping))
        await asyncio.wait({running, signals.stop}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not signals.limited.done() and stopping.finish():
            await asyncio.wait({running, signals.limited}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            stopping.is_cancelled = True
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled():
            running.result()
        return signal.Signals(signals.number) if signals.number else None

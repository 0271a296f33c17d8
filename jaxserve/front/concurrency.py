"""Work on many things, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def bounded_as_completed(
    items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, R]], *, limit: int
) -> AsyncGenerator[R, None]:
    """Yields the results of ``work`` as they come, with up to ``limit`` items in flight.

    An item is taken when there is a place for it, so ``items`` may be without end. The first error
    is raised. That, and closing the generator, cancels what is in flight and waits until it ended.
    """
    rest = iter(items)
    running: set[asyncio.Task[R]] = set()
    done: set[asyncio.Task[R]] = set()
    try:
        while True:
            running |= {
                asyncio.create_task(work(item)) for item in islice(rest, limit - len(running))
            }
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *done, return_exceptions=True)

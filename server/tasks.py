"""Tasks of a server process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The event that interrupts some work came before its end."""


async def unless_done(event: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. Cancels it and raises Interrupted if ``event`` is first."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, event}, return_when=asyncio.FIRST_COMPLETED)
    # If both are done, the event may be the reason why the work failed.
    if task.done() and (task.exception() is None or not event.done()):
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise Interrupted


@contextlib.contextmanager
def background(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs ``work`` while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()

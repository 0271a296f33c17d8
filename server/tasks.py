"""Tasks of a server process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

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
    """Runs ``work`` while the block runs. Logs its failure."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s failed", task.get_coro(), exc_info=task.exception())

"""Tasks and threads of a server process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

A = TypeVar("A")
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


async def in_daemon_thread(function: Callable[[A], T], argument: A) -> T:
    """Returns the result of a function that may take minutes, such as a download.

    Unlike `asyncio.to_thread`, it does not keep a process alive that is told to stop.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function(argument))
        except BaseException as error:
            result.set_exception(error)

    result.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


@contextlib.contextmanager
def background(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs ``work`` while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()

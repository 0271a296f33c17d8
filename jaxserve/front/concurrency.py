"""Merges streams, and runs a limited number of coroutines at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 8
"""Number of streams that are started, stopped or read before other tasks run. Together
they take at most a few milliseconds."""


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all streams as they arrive.

    Raises the first error of a stream. After an error, and when the generator is closed, closes
    every stream. Other tasks run in between, however many streams there are.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    ended = object()
    arrived: asyncio.Queue = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await arrived.put(item)
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(ended)

    pumps: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            pumps.append(asyncio.create_task(pump(stream)))
            if len(pumps) % AT_ONCE == 0:
                await asyncio.sleep(0)
        open_streams = len(pumps)
        num_read = 0
        while open_streams:
            num_read += 1
            if num_read % AT_ONCE == 0:  # `get` does not wait if there is an item
                await asyncio.sleep(0)
            item = await arrived.get()
            if item is ended:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(pumps)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks, a few at a time, and waits until they have ended."""
    try:
        for start in range(0, len(tasks), AT_ONCE):
            some = tasks[start : start + AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # if this was cancelled, some tasks have not been
        for task in tasks:
            task.cancel()


async def bounded_as_completed(
    items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, R]], *, limit: int
) -> AsyncGenerator[R, None]:
    """Yields the results of ``work`` as they complete, with up to ``limit`` items in flight.

    An item is read only when its work can start, so ``items`` may be infinite. Raises the first
    error of ``work``. After an error, and when the generator is closed, cancels all work in flight
    and waits until it has ended.
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


async def for_each(
    items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, None]], *, limit: int
) -> None:
    """Runs ``work`` on every item, with up to ``limit`` items in flight.

    An item is requested only when its work can start. Raises the first error of ``work`` or
    ``items``, and when it is cancelled, after all work in flight has been cancelled and has ended.
    """
    free = asyncio.Semaphore(limit)

    async def run(item: T) -> None:
        await work(item)
        free.release()

    try:
        async with asyncio.TaskGroup() as group:
            await free.acquire()
            async for item in items:
                group.create_task(run(item))
                await free.acquire()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors

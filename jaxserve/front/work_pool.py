"""Threads for one kind of work. Each kind has its own, so that none waits for another one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from jaxserve.errors import QueueFullError

T = TypeVar("T")

SIZE_PER_S = 1 << 18
"""Smaller work overtakes work of this size, in characters or values, if it arrives up to a second
later. A thread does at least about this much in a second."""


class Abandoned(Exception):
    """Ends work in a thread whose caller no longer waits for it."""


class Caller:
    """The caller of some work in a thread, as the work sees it."""

    def __init__(self) -> None:
        self._left = threading.Event()

    def check(self) -> None:
        """Raises Abandoned if the caller no longer waits. Call it between parts of long work."""
        if self._left.is_set():
            raise Abandoned

    def leave(self) -> None:
        """Says that the caller no longer waits."""
        self._left.set()


class WorkPool:
    """Runs functions in threads of its own, and lets others wait in a queue of limited length.

    The queue is sorted by arrival plus size / `SIZE_PER_S`, so small work overtakes large work that
    has not waited for long, and nothing waits for ever.

    Args:
      name: the name of its threads.
      num_threads: the most functions that run at a time.
      max_waiting: the most functions that wait for a thread.
    """

    def __init__(self, name: str, *, num_threads: int = 1, max_waiting: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_running = 0
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        """The number of functions that wait for a thread."""
        return len(self._queue)

    def close(self) -> None:
        """Ends the idle threads now, and the others after their work. `run` fails from now on."""
        self._executor.shutdown(wait=False)

    async def run(self, work: Callable[[Caller], T], *, size: int = 0) -> T:
        """Returns the result of ``work`` in a thread, or raises what it raises.

        A cancelled call leaves the queue. If its work has begun, the thread is free once the work
        ends; `Caller.check` ends it early.

        Raises:
          QueueFullError: too many wait, and this is the last in the queue.
        """
        if self._num_running == self._num_threads:
            await self._turn(size)
        else:
            self._num_running += 1
        loop = asyncio.get_running_loop()
        caller, result = Caller(), loop.create_future()

        def in_thread(to: list[asyncio.Future[T]]) -> None:
            target = to.pop()
            value = error = None
            try:
                value = work(caller)
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended, target, value, error)
            # A result, or the request that an error refers to, can be large. Nothing but the caller
            # may keep it: no cycle of references, as between the futures of `asyncio.wrap_future`
            # or from an error through its frames, the future and back.
            target = value = error = None

        try:
            self._executor.submit(in_thread, [result])
        except BaseException:
            self._next()
            raise
        try:
            return await result
        finally:
            caller.leave()
            del result  # an error refers to this frame

    def _ended(self, result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        """Hands over a result and the thread."""
        self._next()
        if result.done():  # the caller has left
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    async def _turn(self, size: int) -> None:
        """Waits in the queue. Afterwards the caller counts as running."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (loop.time() + size / SIZE_PER_S, next(self._order), turn)
        heapq.heappush(self._queue, entry)
        if len(self._queue) > self._max_waiting:
            self._refuse_last()
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._queue:
                self._remove(entry)
            elif not turn.cancelled() and turn.exception() is None:
                self._next()  # its turn came at the same time
            raise

    def _refuse_last(self) -> None:
        """Removes the last in the queue: large work, if smaller work has come later.

        If a caller has left, its place is removed instead.
        """
        last = max(self._queue, key=lambda entry: (entry[2].cancelled(), entry))
        self._remove(last)
        if not last[2].cancelled():
            which = f"for the same work ({self._name})"
            message = f"{len(self._queue)} requests wait {which}; try again later"
            last[2].set_exception(QueueFullError(message))

    def _remove(self, entry: tuple[float, int, asyncio.Future[None]]) -> None:
        self._queue.remove(entry)
        heapq.heapify(self._queue)

    def _next(self) -> None:
        """Gives a thread that has become free to the first in the queue."""
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            # A cancelled task leaves the queue only when the loop resumes it.
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_running -= 1

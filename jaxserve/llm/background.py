"""The threads of an `LLM`: an event loop and an engine, and how they end."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from jaxserve.client.in_process import InProcessEngine
from jaxserve.engine.core import BuiltEngine
from jaxserve.errors import EngineDeadError
from jaxserve.ipc.messages import Progress

T = TypeVar("T")
OnProgress: TypeAlias = Callable[[Progress], None]

COLLECTION_WAIT_S = 5.0
"""The most seconds for which a garbage collection waits for an engine to end."""


class Background:
    """An event loop in a thread, and the engine that serves it.

    Methods may be called from any thread. The threads end in one of these ways:

        close()             a user's thread    waits until both threads have ended
        collect()           a collection, on   waits a little, and on the threads of this object
                            any thread         not at all
        interpreter exit    the main thread    waits: no thread may be inside jax after that

    After `os.fork`, the child has neither thread; it may only drop the object.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        # Reentrant: a collection can run `collect` wherever memory is allocated.
        self._lock = threading.RLock()
        self._is_closed = False
        self._at_exit = False
        self._calls: set[asyncio.Task[Any]] = set()  # only used on the loop
        self._engine: InProcessEngine | None = None
        self._engine_thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    def start(
        self, build: Callable[[OnProgress], BuiltEngine], on_progress: OnProgress
    ) -> InProcessEngine:
        """Builds the engine in its thread and waits until it is ready.

        If this object is closed meanwhile, the build ends with its next report of progress.
        """

        def build_until_closed() -> BuiltEngine:
            self._engine_thread = threading.current_thread()
            return build(report)

        def report(progress: Progress) -> None:
            # Long phases also report from a thread of their own, where an error would be lost.
            if self._is_closed and threading.current_thread() is self._engine_thread:
                raise EngineDeadError("the LLM was closed while its engine was built")
            on_progress(progress)

        async def start() -> InProcessEngine:
            self._engine = InProcessEngine(build_until_closed)
            await self._engine.until_ready()
            return self._engine

        engine = self.call(start())
        # After jax has registered its own functions, so that this one runs before them.
        atexit.register(self._exit)
        return engine

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result.

        An interrupt (Ctrl-C) cancels the coroutine, and is raised when that has ended.

        Raises:
          EngineDeadError: this object is or becomes closed, or belongs to another process.
        """
        ended: Future[asyncio.Task[T]] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            self._calls.add(tasks[0])
            tasks[0].add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._calls.remove(task)
            ended.set_result(task)

        try:
            self._call_soon(begin)
        except EngineDeadError:
            work.close()
            raise
        try:
            task = ended.result()
        except BaseException:
            with suppress(EngineDeadError):  # all tasks are being cancelled
                self._call_soon(lambda: tasks[0].cancel())
            ended.result()
            raise
        if task.cancelled():
            if self._at_exit:
                # Only daemon threads are left. An error would print a traceback from one.
                threading.Event().wait()
            raise EngineDeadError("this LLM has been closed")
        return task.result()

    def close(self) -> None:
        """Ends all calls, the engine and the loop, and waits for their threads. Idempotent."""
        self._begin_to_close()
        if self._can_wait():
            self._thread.join()

    def collect(self) -> None:
        """Does the same for a garbage collection, which must not wait for long.

        The thread of the collection may hold a lock that the engine needs to end.
        """
        self._begin_to_close()
        if self._can_wait():
            self._thread.join(COLLECTION_WAIT_S)

    def _exit(self) -> None:
        self._at_exit = True
        self.close()

    def _can_wait(self) -> bool:
        """Whether the threads of this object exist here, and are other ones than this."""
        own = (self._thread, self._engine_thread)
        return os.getpid() == self._process_id and threading.current_thread() not in own

    def _call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function on the loop. Raises EngineDeadError if it will not run."""
        if os.getpid() != self._process_id:
            raise EngineDeadError(
                "this LLM belongs to the process that created it, and cannot be used in a fork of "
                "it; create the LLM in the process that uses it, or start processes with the "
                'method "spawn"'
            )
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("this LLM has been closed")
            self._loop.call_soon_threadsafe(function)

    def _begin_to_close(self) -> None:
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._ending = self._loop.create_task(self._end())  # the loop alone would not keep it

    async def _end(self) -> None:
        """Ends everything on the loop, and then the loop."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        while self._calls:  # their callers are still to be told
            await asyncio.sleep(0)
        if self._engine is not None:
            await self._engine.close()
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    def _run(self) -> None:
        """Runs the loop, on its thread."""
        self._loop.run_forever()
        self._loop.close()
        atexit.unregister(self._exit)

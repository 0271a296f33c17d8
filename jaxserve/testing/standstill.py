"""Measures how long an event loop stands still, in processor time.

Processor time does not depend on what else the machine does. Two things stop a loop: what runs on
it between two polls of its sockets, and a call in another thread that holds the interpreter (GIL).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAUSE_S = 0.001
"""Time between two attempts to get the interpreter."""

NOTED_S = 0.008
"""Waiting for the interpreter for less than this is normal: a thread keeps it for 5 ms."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """The longest standstill in a period: seconds of processor time, and what ran then."""

    seconds: float = 0.0
    cause: str = "nothing"


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that measures each of its turns.

    Attributes:
      longest: the longest turn since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest = Standstill()

    def reset(self) -> None:
        """Starts a new period."""
        self.longest = Standstill()

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        seconds = time.thread_time() - began
        if seconds > self.longest.seconds:
            self.longest = Standstill(seconds, "a turn of the event loop")


class InterpreterWatch:
    """Finds threads that hold the interpreter for long, from a thread of its own.

    The thread tries to get the interpreter again and again. When that takes long, not counting the
    time for which it could run but had no processor, the thread that has used most processor time
    meanwhile is the cause. The time that counts is the smaller one of the wait and of that
    processor time. A wait that has another reason, on a busy machine, can coincide with a thread
    that works without the interpreter, so repeat a measurement before you believe it.

    Args:
      ignored: names of threads that do not count.
    """

    def __init__(self, *, ignored: frozenset[str] = frozenset()) -> None:
        self._ignored = ignored
        self._stop = threading.Event()
        self._longest = Standstill()
        self._thread = threading.Thread(target=self._run, name="interpreter watch", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    @property
    def longest(self) -> Standstill:
        """The longest time for which one thread held the interpreter, since `reset`."""
        return self._longest

    def reset(self) -> None:
        """Starts a new period."""
        self._longest = Standstill()

    def _run(self) -> None:
        while not self._stop.is_set():
            before = {thread.native_id: thread for thread in threading.enumerate()}
            used = {native: _processor_time(native) for native in before}
            own = threading.get_native_id()
            began, delay = time.monotonic(), _delay(own)
            time.sleep(PAUSE_S)
            waited = time.monotonic() - began - PAUSE_S - (_delay(own) - delay)
            if waited > NOTED_S:
                self._note(waited, used)

    def _note(self, waited: float, used: dict[int | None, float]) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread is self._thread or thread.name in self._ignored:
                continue
            seconds = _processor_time(thread.native_id) - used.get(thread.native_id, 0.0)
            seconds = min(seconds, waited)
            if seconds > self._longest.seconds:
                frame = frames.get(thread.ident or 0)
                place = "" if frame is None else "".join(traceback.format_stack(frame)[-3:])
                self._longest = Standstill(seconds, f"thread {thread.name!r} at\n{place}")


def _processor_time(native_id: int | None) -> float:
    """Returns the seconds that a thread of this process has run; 0 if it has ended."""
    return _scheduled(native_id)[0]


def _delay(native_id: int | None) -> float:
    """Returns the seconds for which a thread could run but had no processor; 0 if it has ended."""
    return _scheduled(native_id)[1]


def _scheduled(native_id: int | None) -> tuple[float, float]:
    try:
        text = Path(f"/proc/self/task/{native_id}/schedstat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    running, delayed, _ = text.split()
    return int(running) / 1e9, int(delayed) / 1e9

"""What the phases of a start-up report while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from jaxserve.ipc.messages import Progress

REPEAT_S = 2.0
"""A phase that has nothing new to report says the same again after this time."""


class Phase:
    """One phase of the start-up of an engine, as a context manager.

    Reports when it starts, on every `update`, and with its duration when it ends without an error;
    in between it repeats itself from a thread of its own, so that nobody has to wonder whether the
    process hangs.

    Args:
      engine: number of the engine.
      name: the phase.
      unit: what is counted.
      on_progress: takes the reports, from two threads but one at a time.
    """

    def __init__(
        self, engine: int, name: str, unit: str, on_progress: Callable[[Progress], None]
    ) -> None:
        self._now = Progress(engine, name, 0, 0, unit)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._report(self._now)
        self._thread.start()
        return self

    @property
    def seconds(self) -> float:
        """Since the start of the phase."""
        return time.monotonic() - self._start

    def update(self, done: float, total: float, detail: str = "") -> None:
        """Reports that ``done`` of ``total`` is done."""
        self._report(msgspec.structs.replace(self._now, done=done, total=total, detail=detail))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._report(msgspec.structs.replace(self._now, seconds=self.seconds))

    def _repeat(self) -> None:
        while not self._ended.wait(REPEAT_S):
            self._report(self._now)

    def _report(self, progress: Progress) -> None:
        with self._lock:
            self._now = progress
            self._on_progress(progress)

"""Progress reports of a starting engine: `Phase` sends them, `ProgressLines` prints them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

import msgspec

from jaxserve.ipc.messages import Progress
from jaxserve.program.stderr import ProgressOutput

REPEAT_S = 2.0
"""Seconds after which a phase without news repeats its last report."""

INTERVAL_S = 4.0
"""The fewest seconds between two lines about a running phase."""


class Phase:
    """One phase of the start-up of an engine, as a context manager.

    Reports when it starts, on every `update`, and with its duration when it ends without an error.
    A thread repeats the last report in between, so that users can tell a slow start from a hang.

    Args:
      engine: index of the engine.
      name: name of the phase.
      unit: unit of the numbers in `update`.
      on_progress: receives the reports, from two threads but never concurrently.
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
        """Seconds since the start of the phase."""
        return time.monotonic() - self._start

    def update(self, done: float, total: float, detail: str = "") -> None:
        """Reports progress: ``done`` of ``total`` units."""
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


class ProgressLines:
    """Prints a line when a phase ends, and at most one every `INTERVAL_S` while it runs.

    Pass the object as the ``on_progress`` callback.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        """Prints to ``out``, or to the standard error output if None.

        A line that cannot be printed is dropped.
        """
        self._out = ProgressOutput(out)
        self._printed_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.seconds is None and now - self._printed_s < INTERVAL_S:
            return
        self._printed_s = now
        print(describe(progress), file=self._out, flush=True)


def describe(progress: Progress) -> str:
    """Formats a report as one line."""
    count = f"{progress.done:g} of {progress.total:g}" if progress.total else f"{progress.done:g}"
    parts = [f"engine {progress.engine}: {progress.phase}: {count} {progress.unit}"]
    if progress.detail:
        parts.append(progress.detail)
    if progress.seconds is not None:
        parts.append(f"{progress.seconds:.1f} s")
    return ", ".join(parts)

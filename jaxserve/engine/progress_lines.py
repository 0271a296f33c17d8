"""Start-up work of an engine as plain lines of text."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from jaxserve.ipc.messages import Progress

INTERVAL_S = 4.0
"""How long a phase may go on without a line."""


class ProgressLines:
    """Prints a line when a phase has ended, and now and then while it lasts.

    Calling it with a `Progress` prints what is due.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        """``out`` is the standard error output unless given."""
        self._out = out or sys.stderr
        self._printed_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.seconds is None and now - self._printed_s < INTERVAL_S:
            return
        self._printed_s = now
        print(describe(progress), file=self._out, flush=True)


def describe(progress: Progress) -> str:
    """One line about a phase."""
    count = f"{progress.done:g} of {progress.total:g}" if progress.total else f"{progress.done:g}"
    parts = [f"engine {progress.engine}: {progress.phase}: {count} {progress.unit}"]
    if progress.detail:
        parts.append(progress.detail)
    if progress.seconds is not None:
        parts.append(f"{progress.seconds:.1f} s")
    return ", ".join(parts)

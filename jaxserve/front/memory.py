"""Gives freed memory back to the system after large requests."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable

LARGE = 1 << 18
"""Work of this size, in characters or values, may leave tens of MiB of freed memory behind."""

DELAY_S = 1.0
"""Seconds between large work and the return of its memory. By then most replies have been sent."""


class FreedMemory:
    """Returns the freed memory of large work to the system, in a thread, once in `DELAY_S`.

    The allocator of glibc keeps freed memory for later, separately for each thread. Without glibc
    this does nothing.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._timer: asyncio.TimerHandle | None = None

    def after(self, size: int) -> None:
        """Notes that work of this size has ended. Call it on the event loop."""
        if size >= LARGE and self._trim is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._start)

    def _start(self) -> None:
        assert self._trim is not None
        self._timer = None
        # `ctypes` releases the GIL. A thread that is new each time has no memory of its own.
        threading.Thread(target=self._trim, args=(0,), name="trim", daemon=True).start()

"""Waits for conditions that only a defect delays for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005


def wait_until(condition: Callable[[], object], *, within_s: float = 60) -> None:
    """Waits until a condition holds. Raises AssertionError if it does not within ``within_s``."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {within_s} s"
        time.sleep(POLL_S)


async def until(condition: Callable[[], object], *, within_s: float = 60) -> None:
    """Waits like `wait_until`, and lets the event loop run meanwhile."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {within_s} s"
        await asyncio.sleep(POLL_S)

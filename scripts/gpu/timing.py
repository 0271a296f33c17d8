"""Timing of programs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS = 3
ROUND_S = 0.08


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds that the device takes for one of many consecutive calls.

    The first call does not count, as it may compile. The result is the best of a few rounds, since
    a disturbance can only make a round longer.

    Args:
      fn: a jitted function without donated arguments.
      args: arguments on the device.
    """
    jax.block_until_ready(fn(*args))
    once = _round(fn, args, 1)
    calls = max(1, min(1000, int(ROUND_S / once)))
    return min(_round(fn, args, calls) for _ in range(ROUNDS))


def _round(fn: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = fn(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls

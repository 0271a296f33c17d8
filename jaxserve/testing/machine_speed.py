"""Measures processor time in seconds of one reference machine, on whatever machine runs the test.

Processor time does not count what other processes do, but grows with them all the same: they share
the caches, the memory and often the cores. So a time that is compared with a limit is divided by
the slowness of the moment: how much longer than on the reference machine some fixed work of the
same kind takes, on average of right before and right after what is measured.

The larger one of the two would hide defects: of a few tries, the shortest counts, and that would be
the one with the largest error of the slowness.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

MAX_HOLD_S = 0.032
"""The longest that a test lets a piece of work hold the interpreter, in seconds of the reference
machine. The server promises 20 ms on a quiet machine; on a busy one, which shares caches and memory
among its processes, a time varies by half even in relation to the fixed work."""

RUNS = 3
"""The work is repeated, and the fastest run counts, as it meets the fewest interruptions."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Fixed work.

    Attributes:
      work: does it.
      seconds: the processor time that it takes on the reference machine, when nothing else runs
        there: an AMD EPYC of the type Genoa at 2.6 GHz, Python 3.13.
    """

    work: Callable[[], object]
    seconds: float

    def slowness(self) -> float:
        """Returns how much longer the work takes now, at least 1."""
        times = []
        for _ in range(RUNS):
            start = time.thread_time()
            self.work()
            times.append(time.thread_time() - start)
        return max(min(times) / self.seconds, 1.0)

    @contextmanager
    def measuring(self) -> Iterator[Slowness]:
        """Measures the slowness around the block, whose end completes the result."""
        result = Slowness(self.slowness())
        yield result
        result.value = (result.value + self.slowness()) / 2


@dataclass(slots=True)
class Slowness:
    """The slowness of the machine in a period.

    Attributes:
      value: 1 on the reference machine. Divide times by it.
    """

    value: float


_IDS_AND_TEXT = json.dumps(
    {"ids": [51_234 + i for i in range(20_000)], "texts": ["Chào, thế giới. " * 40] * 1000},
    ensure_ascii=False,
).encode()


def _handle_entries() -> None:
    """Does what a front does with the entries of a reply: builds them, then encodes them."""
    entries = [
        {"token": f"token_{i}", "logprob": -1.5 * i, "bytes": list(f"token_{i}".encode())}
        for i in range(600)
    ]
    json.loads(json.dumps(entries))


DECODING = Reference(lambda: msgspec.json.decode(_IDS_AND_TEXT), 0.002)
"""Decoding JSON in one call."""

PYTHON = Reference(_handle_entries, 0.002)
"""Work in Python with calls of the JSON modules, as in the event loop of a server."""

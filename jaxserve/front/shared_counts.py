"""Counts that the processes of a server share in memory, without messages.

Each front process, and the main process, has a part of one memory file (memfd), which has no name
and no place on a disk. It lives as long as a process has it open, so the counts of a front process
outlive it, and the process that replaces it goes on with them.

    part 0        part 1        ...  part N
    front 0       front 1            main process
    | gauges | counters | buckets of histograms | steps of engine 0 | steps of engine 1 | ...

    main   counts = SharedCounts.create(num_fronts=n, num_engines=d)
           start a front process with pass_fds=(counts.fileno(),)
           when the process of front i has ended: counts.clear_gauges(i)
    front  counts = SharedCounts.attach(descriptor, index=i, num_fronts=n, num_engines=d)

A cell is an aligned double, which x86-64 and ARM64 store as a whole. So a reader sees a value that
was written, whenever a process is killed. Between two cells there is no such promise: the sum of a
histogram may lack a value that its buckets have.
"""

from __future__ import annotations

import mmap
import os

from jaxserve.front.counts import NUM_GAUGES, sums
from jaxserve.front.metrics import num_cells

CELL_BYTES = 8
CACHE_LINE_BYTES = 64


class SharedCounts:
    """Implements `jaxserve.front.counts.Counts` for one of several processes.

    Attributes:
      own: the cells of this process.
    """

    def __init__(self, descriptor: int, *, index: int, num_fronts: int, num_engines: int) -> None:
        """Maps the memory file. Use `create` or `attach`."""
        assert 0 <= index <= num_fronts, f"part {index} of {num_fronts + 1}"
        size, part_bytes = _sizes(num_fronts, num_engines)
        found = os.fstat(descriptor).st_size
        assert found == size, f"the counts of another server: expected {size} bytes, got {found}"
        cells = memoryview(mmap.mmap(descriptor, size)).cast("d")
        count, step = num_cells(num_engines), part_bytes // CELL_BYTES
        self._parts = [cells[i * step : i * step + count] for i in range(num_fronts + 1)]
        self._descriptor: int | None = descriptor
        self.own = self._parts[index]

    @classmethod
    def create(cls, *, num_fronts: int, num_engines: int) -> SharedCounts:
        """Returns new counts, all 0, for the main process. `close` them."""
        size, _ = _sizes(num_fronts, num_engines)
        descriptor = os.memfd_create("jaxserve-counts")
        os.ftruncate(descriptor, size)
        return cls(descriptor, index=num_fronts, num_fronts=num_fronts, num_engines=num_engines)

    @classmethod
    def attach(
        cls, descriptor: int, *, index: int, num_fronts: int, num_engines: int
    ) -> SharedCounts:
        """Returns the counts for a front process, which goes on with those of its predecessor.

        Nothing is in flight in a new process, so its gauges become 0.

        Args:
          descriptor: the inherited descriptor of the memory file. It is closed.
          index: the index of the front.
          num_fronts, num_engines: as in `create`.
        """
        counts = cls(descriptor, index=index, num_fronts=num_fronts, num_engines=num_engines)
        counts.close()
        counts.clear_gauges(index)
        return counts

    def fileno(self) -> int:
        """Returns the descriptor, for processes that inherit it."""
        assert self._descriptor is not None, "the counts are closed"
        return self._descriptor

    def total(self, cell: int) -> float:
        """Returns the sum of one cell over all processes."""
        return sum(part[cell] for part in self._parts)

    def totals(self) -> list[float]:
        """Returns the sums of all cells."""
        return sums(self._parts)

    def clear_gauges(self, index: int) -> None:
        """Sets the gauges of a front to 0. Its process must have ended, or be this one."""
        for cell in range(NUM_GAUGES):
            self._parts[index][cell] = 0

    def close(self) -> None:
        """Closes the descriptor. The counts can be used on. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _sizes(num_fronts: int, num_engines: int) -> tuple[int, int]:
    """Returns the bytes of the file and of a part. Parts share no cache line."""
    lines = -(-num_cells(num_engines) * CELL_BYTES // CACHE_LINE_BYTES)
    return (num_fronts + 1) * lines * CACHE_LINE_BYTES, lines * CACHE_LINE_BYTES

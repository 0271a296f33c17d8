"""The numbers that the processes of a server count together.

Every number has a *cell*: a float64 at an index that is the same in every process. A process writes
its own cells only, and the number of the server is the sum over its processes. `LocalCounts` are
the cells of a process that counts alone; `front.shared_counts` are those of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

IN_FLIGHT, BODY_BYTES = range(2)
"""The cells of gauges: completions in flight, bytes of bodies. Counters have the cells after them;
see `front.metrics`."""

NUM_GAUGES = 2


class Cells(Protocol):
    """The cells of one process, by index."""

    def __getitem__(self, cell: int, /) -> float: ...

    def __setitem__(self, cell: int, value: float, /) -> None: ...

    def __len__(self) -> int: ...


class Counts(Protocol):
    """The counts of a process, and their sums over the processes of its server."""

    @property
    def own(self) -> Cells:
        """The cells of this process."""
        ...

    def total(self, cell: int) -> float:
        """Returns the sum of one cell over all processes."""
        ...

    def totals(self) -> Cells:
        """Returns the sums of all cells, to be read only."""
        ...


class LocalCounts:
    """Implements `Counts` for a process that counts alone."""

    def __init__(self, num_cells: int) -> None:
        self.own: list[float] = [0] * num_cells

    def total(self, cell: int) -> float:
        """Returns the value of a cell."""
        return self.own[cell]

    def totals(self) -> list[float]:
        """Returns the cells themselves: they are the sums."""
        return self.own


class Gauge:
    """An integer that goes up and down, such as the number of completions in flight.

    Args:
      counts: where it is counted; None: in this process only.
      cell: its cell.
    """

    def __init__(self, counts: Counts | None = None, cell: int = 0) -> None:
        self._counts = counts or LocalCounts(cell + 1)
        self._own = self._counts.own
        self._cell = cell

    def add(self, more: int) -> None:
        """Changes the part of this process."""
        self._own[self._cell] += more

    @property
    def own(self) -> int:
        """The part of this process."""
        return int(self._own[self._cell])

    @property
    def total(self) -> int:
        """The sum over all processes of the server."""
        return int(self._counts.total(self._cell))


def sums(parts: Sequence[Cells]) -> list[float]:
    """Returns the sum of each cell over these processes. All have the same number of cells."""
    return [sum(part[cell] for part in parts) for cell in range(len(parts[0]))]

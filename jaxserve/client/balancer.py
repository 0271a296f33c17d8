"""The choice of the engine for a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WAITING_WEIGHT = 4
"""A waiting request counts as this many running ones: its whole prompt must still be computed, and
the engine is full if a request has to wait."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine, as far as the front knows.

    Attributes:
      num_waiting, num_running: as the engine last reported them.
      num_sent: requests that the engine had not handled when it made that report: those sent from
        here, and those of other fronts that have arrived. They count as waiting.
    """

    num_waiting: int
    num_running: int
    num_sent: int = 0

    @property
    def score(self) -> int:
        """``WAITING_WEIGHT * waiting + running``."""
        return WAITING_WEIGHT * (self.num_waiting + self.num_sent) + self.num_running


class Balancer:
    """Picks the engine with the lowest score. Engines with equal scores take turns.

    ``first``: the index of the engine that begins. Fronts of one server begin at different ones.
    """

    def __init__(self, first: int = 0) -> None:
        self._last = first - 1

    def pick(self, loads: Mapping[int, Load]) -> int:
        """Returns the index of the engine for the next request.

        ``loads`` has at least one entry, by engine index.
        """
        best = min(load.score for load in loads.values())
        tied = sorted(engine for engine, load in loads.items() if load.score == best)
        self._last = next((engine for engine in tied if engine > self._last), tied[0])
        return self._last

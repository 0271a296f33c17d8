"""Which engine gets the next request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WAITING_WEIGHT = 4
"""A waiting request counts this much more than a running one: it still has its whole prompt to
compute, and it says that the engine has no room left."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is on board of an engine, as far as the front knows.

    ``num_sent`` requests went out since the counts were last heard: they count as waiting.
    """

    num_waiting: int
    num_running: int
    num_sent: int = 0

    @property
    def score(self) -> int:
        """``4 * waiting + running``."""
        return WAITING_WEIGHT * (self.num_waiting + self.num_sent) + self.num_running


class Balancer:
    """Picks the engine with the smallest score; engines that tie take turns."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, loads: Mapping[int, Load]) -> int:
        """The index of the engine to send to. ``loads``: by engine index, at least one."""
        best = min(load.score for load in loads.values())
        tied = sorted(engine for engine, load in loads.items() if load.score == best)
        self._last = next((engine for engine in tied if engine > self._last), tied[0])
        return self._last

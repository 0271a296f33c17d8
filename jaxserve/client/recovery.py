"""When an engine that died is started again."""

from __future__ import annotations

from jaxserve.config import STABLE_S

MAX_DELAY_S = 60.0
"""The longest wait before a restart, in seconds."""


class Restarts:
    """Counts the restarts of one engine.

    Args:
      limit: the most restarts in a row.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def next_delay_s(self, served_s: float) -> float | None:
        """Returns the seconds to wait before the next restart, or None if none is left.

        The first restart happens at once. Then the delay doubles, from 1 s to `MAX_DELAY_S`.

        Args:
          served_s: how long the engine had served when it died; 0 if it never could.
        """
        if served_s >= STABLE_S:
            self._in_a_row = 0
        if self._in_a_row >= self._limit:
            return None
        self._in_a_row += 1
        return 0.0 if self._in_a_row == 1 else min(2.0 ** (self._in_a_row - 2), MAX_DELAY_S)

    def describe(self) -> str:
        """Returns, for example, ``restart 2 of 5``."""
        return f"restart {self._in_a_row} of {self._limit}"

"""When an engine that died is started again."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import setting
from jaxserve.errors import ConfigError

STABLE_S = 300.0
"""An engine that has served for this many seconds may use all its restarts again."""

MIN_TIMEOUT_S = 3.0
"""The smallest ``engine_timeout``, in seconds: idle engines send a heartbeat every second."""

MAX_DELAY_S = 60.0
"""The longest wait before a restart, in seconds."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """The recovery of engines that fail or hang.

    Raises:
      ConfigError: a value is out of range.
    """

    engine_timeout: float = setting(
        300.0,
        "seconds after which an engine that sends nothing is killed and restarted; more than the "
        "longest step and the longest compilation take",
    )
    max_engine_restarts: int = setting(
        5,
        "restarts of an engine in a row, with growing delays; the count starts over once it has "
        f"served for {STABLE_S:.0f} s. Requests in flight continue on another engine or on the "
        "restarted one",
    )

    def __post_init__(self) -> None:
        if not self.engine_timeout >= MIN_TIMEOUT_S:
            raise ConfigError(
                f"--engine-timeout must be at least {MIN_TIMEOUT_S:.0f}, got {self.engine_timeout}"
            )
        if self.max_engine_restarts < 0:
            raise ConfigError(
                f"--max-engine-restarts must be at least 0, got {self.max_engine_restarts}"
            )


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

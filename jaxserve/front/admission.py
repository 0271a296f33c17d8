"""The admission limit: how many completions may be in flight, and the permits that count them."""

from __future__ import annotations

import weakref
from types import TracebackType

from jaxserve.errors import QueueFullError
from jaxserve.front.counts import Gauge


class AdmissionLimit:
    """Counts what is in flight and refuses what goes beyond a limit.

    With a gauge that several processes share, the limit is that of all of them together. What two
    processes admit at the same instant may then exceed it: neither has seen what the other admits.

    Args:
      limit: the most in flight.
      unit: names what is counted, for messages.
      in_flight: counts what holds a permit; None: in this process only.

    Attributes:
      limit: as above.
    """

    def __init__(
        self, limit: int, *, unit: str = "completions", in_flight: Gauge | None = None
    ) -> None:
        self.limit = limit
        self._unit = unit
        self._in_flight = in_flight or Gauge()

    @property
    def num_in_flight(self) -> int:
        """The number of permits that are held now, in all processes that share the gauge."""
        return self._in_flight.total

    def admit(self, count: int) -> Permit:
        """Returns a permit for all completions of a request.

        Raises:
          QueueFullError: with these, more than ``limit`` would be in flight.
        """
        num_in_flight = self.num_in_flight
        if num_in_flight + count > self.limit:
            raise QueueFullError(
                f"{num_in_flight} {self._unit} are in flight and the server takes at most "
                f"{self.limit}, but the request needs {count}; try again later"
            )
        return Permit(self._in_flight, count)


class Permit:
    """Counts completions as in flight until `release`, or until it is garbage-collected.

    As a context manager it is released at the end of the block. Collection matters for accepted
    requests that never start: the ``finally`` block of a generator that was never iterated does not
    run.
    """

    def __init__(self, in_flight: Gauge, count: int) -> None:
        in_flight.add(count)
        self._held = _Held(in_flight, count)
        finalizer = weakref.finalize(self, self._held.give_back)
        finalizer.atexit = False

    def release_one(self) -> None:
        """Stops counting one of the completions. Has no effect after the last one."""
        self._held.give_back(1)

    def release(self) -> None:
        """Stops counting the completions that still count."""
        self._held.give_back()

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Held:
    """The completions that a permit still counts. It outlives the permit."""

    def __init__(self, in_flight: Gauge, count: int) -> None:
        self._in_flight = in_flight
        self._count = count

    def give_back(self, count: int | None = None) -> None:
        count = self._count if count is None else min(count, self._count)
        self._count -= count
        self._in_flight.add(-count)

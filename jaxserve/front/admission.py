"""The admission limit: how many completions may be in flight, and the permits that count them."""

from __future__ import annotations

import weakref
from types import TracebackType

from jaxserve.errors import QueueFullError


class AdmissionLimit:
    """Counts what is in flight and refuses what goes beyond a limit.

    Attributes:
      limit: the most in flight.
      num_in_flight: how many hold a permit now.
    """

    def __init__(self, limit: int, *, unit: str = "completions") -> None:
        """``unit`` names what is counted, for messages."""
        self.limit = limit
        self.num_in_flight = 0
        self._unit = unit

    def admit(self, count: int) -> Permit:
        """Returns a permit for all completions of a request.

        Raises:
          QueueFullError: with these, more than ``limit`` would be in flight.
        """
        if self.num_in_flight + count > self.limit:
            raise QueueFullError(
                f"{self.num_in_flight} {self._unit} are in flight and the server takes at most "
                f"{self.limit}, but the request needs {count}; try again later"
            )
        return Permit(self, count)


class Permit:
    """Counts completions as in flight until `release`, or until it is garbage-collected.

    As a context manager it is released at the end of the block. Collection matters for accepted
    requests that never start: the ``finally`` block of a generator that was never iterated does not
    run.
    """

    def __init__(self, admission: AdmissionLimit, count: int) -> None:
        admission.num_in_flight += count
        self._held = _Held(admission, count)
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

    def __init__(self, admission: AdmissionLimit, count: int) -> None:
        self._admission = admission
        self._count = count

    def give_back(self, count: int | None = None) -> None:
        count = self._count if count is None else min(count, self._count)
        self._count -= count
        self._admission.num_in_flight -= count

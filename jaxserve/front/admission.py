"""The admission limit: how many completions may be in flight, and the permits that count them."""

from __future__ import annotations

import weakref

from jaxserve.errors import QueueFullError


class AdmissionLimit:
    """Counts the completions in flight and refuses those beyond a limit.

    Attributes:
      limit: the most completions in flight.
      num_in_flight: completions that hold a permit now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_in_flight = 0

    def admit(self, num_completions: int) -> Permit:
        """Returns a permit for all completions of a request.

        Raises:
          QueueFullError: with these, more than ``limit`` completions would be in flight.
        """
        if self.num_in_flight + num_completions > self.limit:
            raise QueueFullError(
                f"{self.num_in_flight} completions are in flight and the server takes at most "
                f"{self.limit}, but the request needs {num_completions}; try again later"
            )
        return Permit(self, num_completions)


class Permit:
    """Counts completions as in flight until `release`, or until it is garbage-collected.

    Collection matters for accepted requests that never start: the ``finally`` block of a
    generator that was never iterated does not run.
    """

    def __init__(self, admission: AdmissionLimit, num_completions: int) -> None:
        admission.num_in_flight += num_completions
        self._release = weakref.finalize(self, _release, admission, num_completions)
        self._release.atexit = False

    def release(self) -> None:
        """Stops counting the completions. Further calls have no effect."""
        self._release()


def _release(admission: AdmissionLimit, num_completions: int) -> None:
    admission.num_in_flight -= num_completions

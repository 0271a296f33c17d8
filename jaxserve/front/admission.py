"""The admission of a server, one for each answer in flight."""

from __future__ import annotations

import weakref

from jaxserve.errors import QueueFullError


class AdmissionLimit:
    """Counts the answers in flight, and turns away those for which there is no place.

    Args:
      limit: how many there are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    def take(self, num_answers: int) -> Permit:
        """Takes so many admission at once, all or none.

        Raises:
          QueueFullError: there are not so many left.
        """
        if self.num_taken + num_answers > self.limit:
            raise QueueFullError(
                f"{self.num_taken} requests are in flight and the server takes at most "
                f"{self.limit}; try again later"
            )
        return Permit(self, num_answers)


class Permit:
    """Some of the admission, until `release`, or until nothing refers to this object any more.

    The latter is for work that is accepted and then never begins: a generator that was not asked
    for an item runs no ``finally``.
    """

    def __init__(self, admission: AdmissionLimit, number: int) -> None:
        admission.num_taken += number
        self._return = weakref.finalize(self, _return, admission, number)
        self._return.atexit = False

    def release(self) -> None:
        """Makes room for others. May be called again."""
        self._return()


def _return(admission: AdmissionLimit, number: int) -> None:
    admission.num_taken -= number

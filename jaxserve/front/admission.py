"""The places of a server, one for each answer under way."""

from __future__ import annotations

import weakref

from jaxserve.errors import QueueFullError


class Places:
    """Counts the answers under way, and turns away those for which there is no place.

    Args:
      limit: how many there are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    def take(self, num_answers: int) -> TakenPlaces:
        """Takes so many places at once, all or none.

        Raises:
          QueueFullError: there are not so many left.
        """
        if self.num_taken + num_answers > self.limit:
            raise QueueFullError(
                f"{self.num_taken} requests are under way and the server takes at most "
                f"{self.limit}; try again later"
            )
        return TakenPlaces(self, num_answers)


class TakenPlaces:
    """Some of the places, until `give_back`, or until nothing refers to this object any more.

    The latter is for work that is accepted and then never begins: a generator that was not asked
    for an item runs no ``finally``.
    """

    def __init__(self, places: Places, number: int) -> None:
        places.num_taken += number
        self._return = weakref.finalize(self, _return, places, number)
        self._return.atexit = False

    def give_back(self) -> None:
        """Makes room for others. May be called again."""
        self._return()


def _return(places: Places, number: int) -> None:
    places.num_taken -= number

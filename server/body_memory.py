"""One limit on the memory of all request bodies together.

When a body needs memory that others hold, those that arrive too slowly give theirs back: their
requests are refused. So uploads that pause cannot lock others out, and a slow one is disturbed only
while memory is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from starlette.exceptions import HTTPException

from jaxserve.config import MIB

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count. Ordinary requests are smaller, so they are received even
while large bodies use up the limit. A connection buffers as much anyway."""

MIN_BYTES_PER_S = 16 * 1024
PAUSE_S = 2.0
"""A body that pauses for longer than `PAUSE_S`, or arrives more slowly than `MIN_BYTES_PER_S`, may
have to give its memory to others."""

CLOSE = {"Connection": "close"}
"""The headers of an error whose request has not been read to its end: the connection cannot be used
again."""


class BodyMemory:
    """Counts the bytes of the bodies that are being received or decoded.

    Args:
      limit: the most bytes at a time, not counting the first `FREE_BYTES` of each body.
      clock: returns seconds, like `time.monotonic`; replaced in tests.

    Attributes:
      limit: as given.
      num_bytes: the bytes counted at present.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.clock = clock
        self._receiving: set[BodyShare] = set()

    def share(self) -> BodyShare:
        """Returns the share of one body. Use it as a context manager, which gives it back."""
        return BodyShare(self, self._receiving)

    def make_room(self, num_bytes: int) -> bool:
        """Returns whether there is room for ``num_bytes`` more.

        If there is not, the bodies that are too slow give their memory back, those that have paused
        for the longest first. If they all together have too little, they keep it.
        """
        missing = self.num_bytes + num_bytes - self.limit
        if missing <= 0:
            return True
        slow = [share for share in self._receiving if share.num_bytes and share.late_s > 0]
        if sum(share.num_bytes for share in slow) < missing:
            return False
        for share in sorted(slow, key=lambda share: share.late_s, reverse=True):
            if self.num_bytes + num_bytes <= self.limit:
                break
            share.evict()
        return True


class BodyShare:
    """The part of a `BodyMemory` that one body takes.

    Args:
      memory: the memory of all bodies.
      receiving: the shares whose bodies are still arriving; this one adds and removes itself.

    Attributes:
      num_bytes: the bytes that it takes.
      on_evicted: called when the body has to end, since others need its memory.
      is_evicted: whether that has happened.
    """

    def __init__(self, memory: BodyMemory, receiving: set[BodyShare]) -> None:
        self.num_bytes = 0
        self.on_evicted: Callable[[], None] = lambda: None
        self.is_evicted = False
        self._memory = memory
        self._receiving = receiving
        self._body_bytes = 0
        self._in_time_until_s = memory.clock() + PAUSE_S

    @property
    def late_s(self) -> float:
        """Seconds for which the body has been too slow; negative if it is not."""
        return self._memory.clock() - self._in_time_until_s

    def grow_to(self, body_bytes: int) -> None:
        """Takes what a body of ``body_bytes`` needs, because more of it has arrived.

        Raises:
          HTTPException: that is too much, or the body is evicted.
        """
        self._check()
        self._note_progress(body_bytes - self._body_bytes)
        self._body_bytes = body_bytes
        more = max(body_bytes - FREE_BYTES, 0) - self.num_bytes
        if more > 0 and not self._memory.make_room(more):
            raise HTTPException(
                503,
                f"the request bodies in flight exceed this server's limit of "
                f"{self._memory.limit / MIB:g} MiB; try again later",
                CLOSE,
            )
        self._take(more)

    def received(self) -> None:
        """Says that the body has arrived, so that it keeps its memory. Raises HTTPException."""
        self._check()
        self._receiving.discard(self)

    def evict(self) -> None:
        """Gives the memory to others, and calls `on_evicted`."""
        self.is_evicted = True
        self._give_back()
        self.on_evicted()

    def too_slow(self) -> HTTPException:
        """Returns the error of a body that is evicted."""
        return HTTPException(
            408,
            f"the body arrived at less than {MIN_BYTES_PER_S // 1024} KiB/s or paused for over "
            f"{PAUSE_S:g} s while other requests needed its memory; try again later",
            CLOSE,
        )

    def _check(self) -> None:
        if self.is_evicted:  # and its task has not noticed yet
            raise self.too_slow()

    def _note_progress(self, num_bytes: int) -> None:
        """Moves the time until which the body is in time; a burst counts for one pause at most."""
        now_s = self._memory.clock()
        earned_s = max(self._in_time_until_s, now_s) + num_bytes / MIN_BYTES_PER_S
        self._in_time_until_s = min(earned_s, now_s + PAUSE_S)

    def _take(self, num_bytes: int) -> None:
        self._memory.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _give_back(self) -> None:
        self._receiving.discard(self)
        self._take(-self.num_bytes)

    def __enter__(self) -> BodyShare:
        self._receiving.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._give_back()

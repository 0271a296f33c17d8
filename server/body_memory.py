"""One limit on the memory of all request bodies together."""

from __future__ import annotations

from types import TracebackType

from starlette.exceptions import HTTPException

from jaxserve.config import MIB
from jaxserve.front.counts import Gauge

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count. Ordinary requests are smaller, so they are received even
while large bodies use up the limit. A connection buffers as much anyway."""


class BodyMemory:
    """Counts the bytes of the bodies that are being received or decoded.

    With a gauge that several processes share, the limit is that of all of them together. Pieces of
    bodies that two processes receive at the same instant may then exceed it.

    Args:
      limit: the most bytes at a time, not counting the first `FREE_BYTES` of each body.
      in_use: counts them; None: in this process only.

    Attributes:
      limit: as above.
    """

    def __init__(self, limit: int, in_use: Gauge | None = None) -> None:
        self.limit = limit
        self._in_use = in_use or Gauge()

    @property
    def num_bytes(self) -> int:
        """The bytes counted at present, in all processes that share the gauge."""
        return self._in_use.total

    def add(self, more: int) -> None:
        """Counts more bytes of this process, or fewer."""
        self._in_use.add(more)

    def share(self) -> BodyShare:
        """Returns the share of one body. Use it as a context manager, which gives it back."""
        return BodyShare(self)


class BodyShare:
    """The part of a `BodyMemory` that one body takes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0  # that count

    def grow_to(self, body_bytes: int) -> None:
        """Takes what a body of ``body_bytes`` needs. Raises HTTPException if that is too much."""
        more = max(body_bytes - FREE_BYTES, 0) - self._num_bytes
        memory = self._memory
        if more > 0 and memory.num_bytes + more > memory.limit:
            raise HTTPException(
                503,
                f"the request bodies in flight exceed this server's limit of "
                f"{memory.limit / MIB:g} MiB; try again later",
                {"Connection": "close"},
            )
        memory.add(more)
        self._num_bytes += more

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._memory.add(-self._num_bytes)
        self._num_bytes = 0

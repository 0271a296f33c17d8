"""The block tables of the requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.block_pool import BlockPool
from jaxserve.core.request import Request


class KVCacheManager:
    """Grows and frees block tables, `Request.block_ids`, out of a pool.

    Invariant: position ``p`` of a request is kept in block ``block_ids[p // block_size]``.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    @property
    def usage(self) -> float:
        """The held part of the pool, 0 to 1."""
        return self._pool.usage

    def allocate(self, request: Request, num_tokens: int) -> Sequence[int] | None:
        """Makes room for the first ``num_tokens`` tokens of a request.

        Returns the blocks that its table grew by, which may be none, or None if they are not to be
        had; then nothing has changed.
        """
        num_blocks = -(-num_tokens // self._block_size)
        missing = num_blocks - len(request.block_ids)
        if missing <= 0:
            return ()
        if missing > self._pool.num_free:
            return None
        new_block_ids = self._pool.take(missing)
        request.block_ids += new_block_ids
        return new_block_ids

    def free(self, request: Request) -> None:
        """Gives every block of a request back."""
        self._pool.release(request.block_ids)
        request.block_ids = []

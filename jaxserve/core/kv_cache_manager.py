"""Assigns blocks of the KV cache to requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.block_pool import BlockPool
from jaxserve.core.request import Request


class KVCacheManager:
    """Grows and frees block tables (`Request.block_ids`) from a pool.

    Invariant: position ``p`` of a request is stored in block ``block_ids[p // block_size]``.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    @property
    def usage(self) -> float:
        """Fraction of the pool that requests hold, 0 to 1."""
        return self._pool.usage

    def allocate(self, request: Request, num_tokens: int) -> Sequence[int] | None:
        """Extends the block table of a request to cover its first ``num_tokens`` positions.

        Returns the blocks that were appended, possibly none. Returns None, and changes nothing, if
        the pool has too few free blocks.
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
        """Returns all blocks of a request to the pool and empties its block table."""
        self._pool.release(request.block_ids)
        request.block_ids = []

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Asserts that the pool is sound and that ``requests`` hold exactly its used blocks."""
        self._pool.check_integrity()
        tables = [block_id for request in requests for block_id in request.block_ids]
        assert len(tables) == len(set(tables)), "a block is in two tables"
        assert not set(tables) & set(self._pool.free_block_ids()), "a block in a table is free"
        assert len(tables) == self._pool.num_used, "a used block is in no table"

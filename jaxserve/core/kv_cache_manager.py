"""Assigns blocks of the KV cache to requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.block_pool import NULL_BLOCK, BlockPool
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.plan import TableUpdate
from jaxserve.core.request import Request


class KVCacheManager:
    """Grows and frees the block tables of requests (`Request.block_tables`) from a pool.

    Invariant: in group ``g``, position ``p`` of a request is stored in block
    ``block_tables[g][p // block_size]``. The entry is 0 if no later query sees the block, which has
    then been given back.
    """

    def __init__(self, pool: BlockPool, groups: CacheGroups) -> None:
        self._pool = pool
        self._groups = groups

    @property
    def usage(self) -> float:
        """Fraction of the pool that requests hold, 0 to 1."""
        return self._pool.usage

    def allocate(self, request: Request, num_tokens: int) -> Sequence[TableUpdate] | None:
        """Makes the block tables of a request ready for a step, and to hold ``num_tokens`` tokens.

        Gives back the blocks that the next token and all later ones do not see, and appends blocks
        up to position ``num_tokens``, in a windowed group no more than the request may hold at a
        time. There, the rest of a long prompt needs no more blocks than each step gives back. So a
        prompt for which this call succeeded at its first step never lacks a block until its end.

        A step in flight may still read a block that is given back. The device runs steps in order,
        so it has done so before any later step writes to the block.

        Returns the new entries of the tables, possibly none. Returns None, and changes nothing, if
        the pool has too few free blocks.
        """
        if num_tokens <= request.tables_fit:
            return ()
        windows = self._groups.windows
        tables = request.block_tables or [[] for _ in windows]
        start = request.least_computed_tokens
        spans = [self._groups.held(window, start, num_tokens) for window in windows]
        changes: list[tuple[int, list[int], int, range]] = []
        missing = 0
        for group, (table, held) in enumerate(zip(tables, spans, strict=True)):
            unseen = held.start
            while unseen > 0 and table[unseen - 1] != NULL_BLOCK:
                unseen -= 1
            if unseen < held.start or len(table) < held.stop:
                changes.append((group, table, unseen, held))
                missing += max(0, held.stop - len(table)) - (held.start - unseen)
        if missing > self._pool.num_free:
            return None
        request.block_tables = tables
        request.tables_fit = min(map(self._groups.unchanged_until, windows, spans))
        updates: list[TableUpdate] = []
        for group, table, unseen, held in changes:
            if unseen < held.start:
                self._pool.release(table[unseen : held.start])
                table[unseen : held.start] = [NULL_BLOCK] * (held.start - unseen)
                updates.append(TableUpdate(group, unseen, table[unseen : held.start]))
        for group, table, _, held in changes:
            if len(table) < held.stop:
                new_block_ids = self._pool.take(held.stop - len(table))
                updates.append(TableUpdate(group, len(table), new_block_ids))
                table += new_block_ids
        return updates

    def free(self, request: Request) -> None:
        """Returns all blocks of a request to the pool and empties its block tables."""
        for table in request.block_tables:
            self._pool.release([block_id for block_id in table if block_id != NULL_BLOCK])
        request.block_tables, request.tables_fit = [], 0

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Asserts that the pool is sound and that ``requests`` hold exactly its used blocks."""
        self._pool.check_integrity()
        tables: list[int] = []
        for request in requests:
            assert len(request.block_tables) == len(self._groups.windows), "a table is missing"
            for window, table in zip(self._groups.windows, request.block_tables, strict=True):
                held = [block_id for block_id in table if block_id != NULL_BLOCK]
                assert table[len(table) - len(held) :] == held, "a seen block was given back"
                assert window is None or len(held) <= self._groups.most_held(window)
                assert window is not None or len(held) == len(table)
                tables += held
        assert len(tables) == len(set(tables)), "a block is in two tables"
        assert not set(tables) & set(self._pool.free_block_ids()), "a block in a table is free"
        assert len(tables) == self._pool.num_used, "a used block is in no table"

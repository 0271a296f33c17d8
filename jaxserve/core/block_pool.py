"""Who holds which block of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Never handed out: padding may point at it."""

_NOT_FREE = -1


class BlockPool:
    """Reference counts and the free list of ``num_blocks`` blocks, of which block 0 is reserved.

    Free blocks form a ring of links with block 0 as its sentinel, so taking the first, appending
    and unlinking from the middle are O(1) and need no case for an empty list. The list is ordered
    by last use: blocks are taken from the front, and go to the back when their last holder lets go.

    Invariants (`check_integrity`): a block is in the list exactly once if its reference count is
    0, and not at all otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs block 0 and one more, got {num_blocks} blocks"
        self._num_blocks = num_blocks
        self._num_free = num_blocks - 1
        self._num_references = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    @property
    def usage(self) -> float:
        """The held part of the blocks that can be handed out, 0 to 1."""
        return 1 - self._num_free / (self._num_blocks - 1)

    def take(self, count: int) -> list[int]:
        """The ``count`` least recently used free blocks, each now held once."""
        assert 0 <= count <= self._num_free, f"{count} blocks wanted, {self._num_free} are free"
        taken = []
        for _ in range(count):
            block_id = self._next[NULL_BLOCK]
            self._unlink(block_id)
            self._num_references[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each block, held or free."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                self._unlink(block_id)
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes a holder from each block of a block table.

        Last block first, so that of a chain whose beginning others may want again, the end is
        handed out first.
        """
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} is free already"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._append(block_id)

    def free_block_ids(self) -> list[int]:
        """The free blocks in the order in which they would be taken."""
        block_ids = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_integrity(self) -> None:
        """Asserts the invariants of the pool. For tests: it looks at every block."""
        free = self.free_block_ids()
        assert len(free) == self._num_free, f"{len(free)} blocks linked, {self._num_free} counted"
        assert NULL_BLOCK not in free
        assert self._num_references[NULL_BLOCK] == 0
        unreferenced = {b for b in range(1, self._num_blocks) if self._num_references[b] == 0}
        assert set(free) == unreferenced, "the free list and the reference counts disagree"
        assert min(self._num_references) == 0
        chain = [NULL_BLOCK, *free, NULL_BLOCK]
        for left, right in zip(chain, chain[1:], strict=False):
            assert self._next[left] == right, f"next of {left} is {self._next[left]}, not {right}"
            assert self._previous[right] == left, f"previous of {right} is not {left}"
        held = set(range(1, self._num_blocks)) - unreferenced
        assert all(self._next[b] == self._previous[b] == _NOT_FREE for b in held)

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._next[block_id] = self._previous[block_id] = _NOT_FREE
        self._num_free -= 1

    def _append(self, block_id: int) -> None:
        last = self._previous[NULL_BLOCK]
        self._next[last] = self._previous[NULL_BLOCK] = block_id
        self._previous[block_id] = last
        self._next[block_id] = NULL_BLOCK
        self._num_free += 1

"""Reference counts and the free list of KV cache blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Reserved: no request ever holds it, so padding may write to it."""

_NOT_FREE = -1


class BlockPool:
    """Hands out the blocks 1 to ``num_blocks`` - 1. Block 0 is reserved.

    Free blocks form a doubly linked ring with block 0 as the sentinel. So taking the first block,
    appending a block and unlinking a block from the middle are O(1), and the empty list needs no
    special case. The list is ordered by last use: `take` removes blocks from the front, and a block
    whose reference count drops to 0 is appended at the back.

    Invariant (see `check_integrity`): a block is in the free list exactly once if its reference
    count is 0, and not at all otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs at least 2 blocks, got {num_blocks}"
        self._num_blocks = num_blocks
        self._num_free = num_blocks - 1
        self._num_references = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Number of blocks that at least one request holds."""
        return self._num_blocks - 1 - self._num_free

    @property
    def usage(self) -> float:
        """Used blocks as a fraction of all blocks but block 0, 0 to 1."""
        return 1 - self._num_free / (self._num_blocks - 1)

    def take(self, count: int) -> list[int]:
        """Removes the ``count`` least recently used blocks from the free list.

        Each block starts with a reference count of 1. ``count`` must not exceed ``num_free``.
        """
        assert 0 <= count <= self._num_free, f"{count} blocks wanted, {self._num_free} are free"
        taken: list[int] = []
        for _ in range(count):
            block_id = self._next[NULL_BLOCK]
            self._unlink(block_id)
            self._num_references[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block, used or free."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                self._unlink(block_id)
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes a reference from each block of a block table.

        The last block goes first, so the end of a sequence is reused before its beginning, which a
        prefix cache is more likely to find again.
        """
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} is already free"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._append(block_id)

    def free_block_ids(self) -> list[int]:
        """Returns the free blocks in the order in which `take` would return them."""
        block_ids: list[int] = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_integrity(self) -> None:
        """Asserts the invariants of the pool. For tests: visits every block."""
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
        used = set(range(1, self._num_blocks)) - unreferenced
        assert all(self._next[b] == self._previous[b] == _NOT_FREE for b in used)

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

"""Which blocks of the KV cache a request needs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of layers of a KV cache, and the arithmetic of their blocks.

    The layers of a group have the same window, and a request has one block table for each group.
    All groups take their blocks from one pool; a block belongs to one group at a time.

    A windowed group holds only blocks that a query may still see. Its blocks for a long prompt:

        0 ...... start - window + 1 ......... start ............................ num_tokens
        | given back | seen by the next step | computed by it | allocated later |
                     | held: at most `most_held` blocks ......|

    Attributes:
      windows: for each group, the number of latest positions that a query sees, its own included;
        None: all.
      block_size: positions in a block.
      max_num_batched_tokens: the most tokens of a request in one step.
      max_drafts: the most draft tokens of a request in one step. All drafts of a step in flight may
        be accepted or rejected, so the next step may compute as many positions more.
    """

    windows: tuple[int | None, ...]
    block_size: int
    max_num_batched_tokens: int
    max_drafts: int = 0

    def held(self, window: int | None, start: int, num_tokens: int) -> range:
        """Returns the indices in the block table of the blocks that a request must hold.

        Args:
          window: the window of the group.
          start: the first position that is computed next; queries from there on see the blocks.
          num_tokens: the tokens of the request so far.
        """
        stop = self._blocks_for(num_tokens)
        if window is None:
            return range(stop)
        first = max(0, start - window + 1) // self.block_size
        return range(first, min(stop, first + self.most_held(window)))

    def unchanged_until(self, window: int | None, held: range) -> int:
        """Returns the most tokens for which a request that computes the last holds these blocks."""
        covered = held.stop * self.block_size
        if window is None:
            return covered
        return min(covered, (held.start + 1) * self.block_size + window - 1)

    def most_held(self, window: int) -> int:
        """Returns the most blocks that a windowed group of one request holds at any time.

        From the first position that the next step sees to the last that it may compute are
        ``window + ahead - 1`` positions, and the first of them may be the last of its block.
        """
        ahead = self.max_num_batched_tokens + self.max_drafts
        return self._blocks_for(window + ahead - 2) + 1

    def most_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a request holds while it grows to ``num_tokens`` tokens."""
        blocks = self._blocks_for(num_tokens)
        return sum(blocks if w is None else min(blocks, self.most_held(w)) for w in self.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Returns the most tokens, at most ``limit``, of a request that fits ``num_blocks``."""
        lengths = range(self.block_size, limit + self.block_size, self.block_size)
        return min(limit, self.block_size * bisect_right(lengths, num_blocks, key=self.most_blocks))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

"""The padded shapes that the step is compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.core.plan import StepPlan


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A padded step: tokens, rows (one a request), and blocks in a row's block table.

    If there are as many tokens as rows, every request has exactly one token. Ordered by what a
    step costs: its tokens first.
    """

    num_tokens: int
    num_rows: int
    table_width: int

    @property
    def decode_only(self) -> bool:
        """Whether token r is that of request r."""
        return self.num_tokens == self.num_rows

    def holds(self, other: Bucket) -> bool:
        """Whether a step of that size can be padded to this one."""
        return (
            self.num_tokens >= other.num_tokens
            and self.num_rows >= other.num_rows
            and self.table_width >= other.table_width
            and (other.decode_only or not self.decode_only)
        )


MIN_ROWS = 2
"""XLA's product of one row with a matrix is many times slower on a CPU than that of two."""

FEW_ROWS = 8
MIN_MIXED_TOKENS = 32
NARROW_TABLE = 512
FEWEST_SAMPLED = 4
MANY_SAMPLED = 16


class Buckets:
    """All buckets of an engine, and the choice among them.

    Few, since each is a program that has to be compiled:

    * decode steps, in which every request has one token: 2, 4, 8, ... rows;
    * mixed steps, in which some request has more: 32, 64, ... tokens, with either few rows (a
      prompt arrives while little else goes on) or all of them. The number of rows of a mixed step
      only decides how many logits are computed, so two sizes are enough.

    Both times each width of the block tables.

    Args:
      max_num_seqs: requests in a step.
      max_num_batched_tokens: tokens in a step; at least ``max_num_seqs``.
      table_widths: widths of the block tables; the largest must hold the longest request.
    """

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, table_widths: Iterable[int]
    ) -> None:
        max_rows = max(MIN_ROWS, max_num_seqs)
        # One more than the rows at least, or else a mixed step would look like a decode step.
        max_tokens = max(max_num_batched_tokens, max_rows + 1)
        decode = [(rows, rows) for rows in powers_of_two(MIN_ROWS, max_rows)]
        mixed = [
            (tokens, rows)
            for tokens in powers_of_two(min(MIN_MIXED_TOKENS, max_tokens), max_tokens)
            for rows in {min(FEW_ROWS, max_rows), max_rows}
            if tokens > rows
        ]
        self.all = tuple(
            sorted(
                Bucket(tokens, rows, width)
                for tokens, rows in decode + mixed
                for width in set(table_widths)
            )
        )

    def smallest_for(self, plan: StepPlan, block_size: int) -> Bucket:
        """The cheapest bucket that holds the plan."""
        length = max((part.start + part.num_tokens for part in plan.scheduled), default=0)
        size = Bucket(plan.num_tokens, len(plan.scheduled), -(-length // block_size))
        return next(bucket for bucket in self.all if bucket.holds(size))


def table_widths(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """The widths of block tables to compile for, in ascending order.

    Attention stops at the end of each request, so that a wide table costs no more than its way to
    the device: 2 KiB a row at the narrow width. Only longer contexts are worth a second one.
    """
    longest = -(-max_model_len // block_size)
    return (longest,) if longest <= NARROW_TABLE else (NARROW_TABLE, longest)


def sampler_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of rows that the sampler is compiled for, in ascending order.

    Fewer than those of a step, since each is several programs and few rows take little of a step.
    Where many are sampled, twice as many take much more than twice as long.
    """
    sizes = [min(FEWEST_SAMPLED, max_num_seqs)]
    while sizes[-1] < max_num_seqs:
        sizes.append(min((4 if sizes[-1] < MANY_SAMPLED else 2) * sizes[-1], max_num_seqs))
    return tuple(sizes)


def powers_of_two(first: int, last: int) -> list[int]:
    """``first``, twice that and so on, and ``last`` as the end."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]

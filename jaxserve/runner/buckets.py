"""Chooses the padded shapes that the step is compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.core.plan import StepPlan


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The padded size of a step. Buckets are ordered by the cost of a step, tokens first.

    Attributes:
      num_tokens: T. It equals R in decode steps, in which every request has one token, and is
        larger in all others.
      num_rows: R, one per request, and one per draft token.
      table_width: W, blocks in a row's block table.
    """

    num_tokens: int
    num_rows: int
    table_width: int

    @property
    def decode_only(self) -> bool:
        """Whether every request has exactly one token; then token r belongs to request r."""
        return self.num_tokens == self.num_rows

    def holds(self, other: Bucket) -> bool:
        """Returns whether a step of the size of ``other`` can be padded to this bucket."""
        return (
            self.num_tokens >= other.num_tokens
            and self.num_rows >= other.num_rows
            and self.table_width >= other.table_width
            and (other.decode_only or not self.decode_only)
        )


MIN_ROWS = 2
"""On a CPU, XLA multiplies one row by a matrix many times more slowly than two rows."""

FEW_ROWS = 8
"""Rows of the small mixed steps."""

MIN_MIXED_TOKENS = 32
"""Tokens of the smallest mixed step."""

NARROW_TABLE = 512
"""Blocks in the narrow block tables."""

MIN_SAMPLED = 4
"""Rows of the smallest program of the sampler."""

MANY_SAMPLED = 16
"""From this number of sampled rows on, sizes double; below, they quadruple."""


class Buckets:
    """Holds all buckets of an engine, and chooses one for each plan.

    There are few, since each is a program to compile:

    * decode steps, in which every request has one token: 2, 4, 8, ... rows;
    * mixed steps, in which at least one request has more: 32, 64, ... tokens, with either few rows
      (a prompt arrives while few requests run) or all rows. The number of rows of a mixed step only
      decides how many logits are computed, so two sizes are enough.

    Each size exists once for each width of the block tables.

    Args:
      max_num_rows: the largest number of rows in a step.
      max_num_batched_tokens: the largest number of tokens in a step.
      table_widths: widths of the block tables; the largest must hold the longest request.
    """

    def __init__(
        self, *, max_num_rows: int, max_num_batched_tokens: int, table_widths: Iterable[int]
    ) -> None:
        max_rows = max(MIN_ROWS, max_num_rows)
        # A mixed step with as many tokens as rows would look like a decode step.
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
        """Returns the cheapest bucket that holds the plan."""
        length = max((part.start + part.num_tokens for part in plan.scheduled), default=0)
        size = Bucket(plan.num_tokens, len(plan.rows), -(-length // block_size))
        return next(bucket for bucket in self.all if bucket.holds(size))


def table_widths(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Returns the widths of block tables to compile for, in ascending order.

    Attention stops at the end of each request, so a wide table costs only its transfer to the
    device: 2 KiB per row at the narrow width. A second width pays off for longer contexts only.
    """
    longest = -(-max_model_len // block_size)
    return (longest,) if longest <= NARROW_TABLE else (NARROW_TABLE, longest)


def sampler_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of rows that the sampler is compiled for, in ascending order.

    The sampler has fewer sizes than the step, since each size means several programs and sampling a
    few padded rows takes little of a step's time. For many rows the time grows faster than their
    number, so large sizes are closer to each other.
    """
    sizes = [min(MIN_SAMPLED, max_num_seqs)]
    while sizes[-1] < max_num_seqs:
        sizes.append(min((4 if sizes[-1] < MANY_SAMPLED else 2) * sizes[-1], max_num_seqs))
    return tuple(sizes)


def powers_of_two(first: int, last: int) -> list[int]:
    """Returns ``first``, 2 * ``first``, 4 * ``first``, ... below ``last``, and ``last``."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]

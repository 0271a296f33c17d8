"""Builds the arrays of a step from its plan."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from jaxserve.arrays import Leaf
from jaxserve.core.plan import StepPlan
from jaxserve.ops.attention import StepMeta
from jaxserve.runner.buckets import Bucket


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step other than weights and cache.

    T and R are the padded numbers of tokens and requests; S is the number of engine rows.

    Attributes:
      tokens: i32[T]; padding 0.
      fed_from_row: i32[T], the engine row in [0, S) whose last sampled token replaces ``tokens``,
        or -1; padding -1.
      meta: which tokens belong together and where their cache is.
      logit_tokens: i32[R], index in [0, T) of the last token of each row, whose hidden state gives
        the logits; padding 0.
      kept_in_row: i32[R], the engine row in [0, S) that stores the most likely token as its last
        token. The value S stores nothing: for padding, for requests that do not sample or that
        speculate, and for requests whose token comes from the sampler.
    """

    tokens: Int32[Leaf, " tokens"]
    fed_from_row: Int32[Leaf, " tokens"]
    meta: StepMeta
    logit_tokens: Int32[Leaf, " rows"]
    kept_in_row: Int32[Leaf, " rows"]


class BatchBuilder:
    """Builds the inputs of steps, and remembers the block tables of the running requests.

    Args:
      num_rows: S, the engine's rows.
      table_width: W, at least the number of blocks of the longest request.
      num_blocks, block_size: of the KV cache.
      num_groups: G, the groups of layers that have block tables.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        table_width: int,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        self._num_rows = num_rows
        self._block_tables = np.zeros((num_groups, num_rows, table_width), np.int32)
        self._num_slots = num_blocks * block_size
        self._block_size = block_size

    def build(
        self, plan: StepPlan, bucket: Bucket, *, to_sample: Container[int] = ()
    ) -> StepInputs:
        """Returns the inputs of a plan as numpy arrays, padded to a bucket that holds the plan.

        ``to_sample`` has the indices in ``plan.rows`` of the rows whose token comes from the
        sampler. For all other rows that sample, the step stores the most likely token. The rows of
        requests that speculate are left to the `Speculator`.
        """
        for part in plan.scheduled:
            for group, start, block_ids in part.table_updates:
                end = start + len(block_ids)
                self._block_tables[group, part.row, start:end] = block_ids
        parts = plan.rows
        rows = np.fromiter((part.row for part in parts), np.int32, len(parts))
        starts = np.fromiter((part.start for part in parts), np.int32, len(parts))
        lengths = np.fromiter((part.num_tokens for part in parts), np.int32, len(parts))
        if plan.speculates:
            lengths[[part.speculates for part in parts]] = 1
        query_start = np.full(bucket.num_rows + 1, plan.num_tokens, np.int32)
        query_start[0] = 0
        query_start[1 : len(parts) + 1] = np.cumsum(lengths)

        tokens = np.zeros(bucket.num_tokens, np.int32)
        fed_from_row = np.full(bucket.num_tokens, -1, np.int32)
        kept_in_row = np.full(bucket.num_rows, self._num_rows, np.int32)
        for i, part in enumerate(parts):
            first = query_start[i]
            if part.speculates:
                continue
            if part.token_ids:
                tokens[first : first + part.num_tokens] = part.token_ids
            else:
                fed_from_row[first] = part.row
            if part.samples and i not in to_sample:
                kept_in_row[i] = part.row
        logit_tokens = np.zeros(bucket.num_rows, np.int32)
        logit_tokens[: len(parts)] = query_start[1 : len(parts) + 1] - 1
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "fed_from_row": fed_from_row,
            "meta": self._meta(bucket, rows, starts, lengths, query_start),
            "logit_tokens": logit_tokens,
            "kept_in_row": kept_in_row,
        }
        return StepInputs(**arrays)

    def _meta(
        self,
        bucket: Bucket,
        rows: Int32[np.ndarray, " requests"],
        starts: Int32[np.ndarray, " requests"],
        lengths: Int32[np.ndarray, " requests"],
        query_start: Int32[np.ndarray, " bounds"],
    ) -> StepMeta:
        num_tokens = int(query_start[-1])
        positions = np.zeros(bucket.num_tokens, np.int32)
        offsets = np.repeat(starts - query_start[: len(rows)], lengths)
        positions[:num_tokens] = np.arange(num_tokens, dtype=np.int32) + offsets
        num_groups = len(self._block_tables)
        slots = np.full((num_groups, bucket.num_tokens), self._num_slots, np.int32)
        blocks, within = np.divmod(positions[:num_tokens], self._block_size)
        slots[:, :num_tokens] = (
            self._block_tables[:, np.repeat(rows, lengths), blocks] * self._block_size + within
        )
        shape = (num_groups, bucket.num_rows, bucket.table_width)
        block_tables = np.zeros(shape, np.int32)
        block_tables[:, : len(rows)] = self._block_tables[:, rows, : bucket.table_width]
        seq_lens = np.zeros(bucket.num_rows, np.int32)
        seq_lens[: len(rows)] = starts + lengths
        arrays: dict[str, Any] = {
            "positions": positions,
            "slots": slots,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "query_start": query_start,
        }
        return StepMeta(**arrays, decode_only=bucket.decode_only)

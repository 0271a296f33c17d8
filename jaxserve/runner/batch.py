"""From a plan to the arrays of a step."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.arrays import Leaf
from jaxserve.core.plan import StepPlan
from jaxserve.ops.attention import AttentionMeta
from jaxserve.runner.buckets import Bucket


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the step is told, besides weights and cache.

    T is the padded number of tokens, R of requests, S of the engine's rows.

    Attributes:
      tokens: i32[T]; padding 0.
      sources: i32[T], the row in [0, S) whose last sampled token to take in place of ``tokens``,
        or -1; padding -1.
      meta: which tokens belong together and where their cache is.
      last: i32[R], index in [0, T) of the last token of each request; padding 0.
      targets: i32[R], the row in [0, S) where the most likely token is kept; S, which drops it,
        for padding, for requests that do not sample and if the sampler is to choose.
    """

    tokens: Leaf
    sources: Leaf
    meta: AttentionMeta
    last: Leaf
    targets: Leaf


class BatchBuilder:
    """Builds the inputs of steps; remembers the block tables of the live requests.

    Args:
      num_rows: S, the engine's rows.
      table_width: blocks of the longest request, at least.
      num_blocks, block_size: of the KV cache.
    """

    def __init__(
        self, *, num_rows: int, table_width: int, num_blocks: int, block_size: int
    ) -> None:
        self._block_tables = np.zeros((num_rows, table_width), np.int32)
        self._num_slots = num_blocks * block_size
        self._block_size = block_size

    def build(self, plan: StepPlan, bucket: Bucket, *, chosen: Container[int] = ()) -> StepInputs:
        """The inputs of a plan, padded to a bucket that holds it, as numpy arrays.

        The step keeps the most likely token of each request that samples, but for those in
        ``chosen``, by their places in the plan.
        """
        parts = plan.scheduled
        for part in parts:
            end = part.block_offset + len(part.new_block_ids)
            self._block_tables[part.row, part.block_offset : end] = part.new_block_ids
        rows = np.fromiter((part.row for part in parts), np.int32, len(parts))
        starts = np.fromiter((part.start for part in parts), np.int32, len(parts))
        lengths = np.fromiter((part.num_tokens for part in parts), np.int32, len(parts))
        query_start = np.full(bucket.num_rows + 1, plan.num_tokens, np.int32)
        query_start[0] = 0
        query_start[1 : len(parts) + 1] = np.cumsum(lengths)

        tokens = np.zeros(bucket.num_tokens, np.int32)
        sources = np.full(bucket.num_tokens, -1, np.int32)
        targets = np.full(bucket.num_rows, len(self._block_tables), np.int32)
        for i, part in enumerate(parts):
            first = query_start[i]
            if part.token_ids:
                tokens[first : first + part.num_tokens] = part.token_ids
            else:
                sources[first] = part.row
            if part.samples and i not in chosen:
                targets[i] = part.row
        last = np.zeros(bucket.num_rows, np.int32)
        last[: len(parts)] = query_start[1 : len(parts) + 1] - 1
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "sources": sources,
            "meta": self._meta(bucket, rows, starts, lengths, query_start),
            "last": last,
            "targets": targets,
        }
        return StepInputs(**arrays)

    def _meta(
        self,
        bucket: Bucket,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        query_start: np.ndarray,
    ) -> AttentionMeta:
        num_tokens = int(query_start[-1])
        positions = np.zeros(bucket.num_tokens, np.int32)
        offsets = np.repeat(starts - query_start[: len(rows)], lengths)
        positions[:num_tokens] = np.arange(num_tokens, dtype=np.int32) + offsets
        slots = np.full(bucket.num_tokens, self._num_slots, np.int32)
        blocks, within = np.divmod(positions[:num_tokens], self._block_size)
        slots[:num_tokens] = (
            self._block_tables[np.repeat(rows, lengths), blocks] * self._block_size + within
        )
        block_tables = np.zeros((bucket.num_rows, bucket.table_width), np.int32)
        block_tables[: len(rows)] = self._block_tables[rows, : bucket.table_width]
        seq_lens = np.zeros(bucket.num_rows, np.int32)
        seq_lens[: len(rows)] = starts + lengths
        arrays: dict[str, Any] = {
            "positions": positions,
            "slots": slots,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "query_start": query_start,
        }
        return AttentionMeta(**arrays, decode_only=bucket.decode_only)

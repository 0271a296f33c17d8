"""The parameters of each row of logits, as the sampler's functions receive them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.arrays import Leaf

LastTokens = Int32[Array, " engine_rows"]
"""i32[S], the token sampled last in each engine row."""

SMALL_TOP_K = 64
"""Up to this k, top-k searches the best groups of the vocabulary; a larger k needs a bisection."""


class Filters(Enum):
    """The filters that at least one row needs. Static: each value is a program of its own.

    Attributes:
      NONE: no row is filtered.
      SMALL_TOP_K: apply min_p, top_p, and top_k up to `SMALL_TOP_K`.
      LARGE_TOP_K: apply the same filters; at least one row has a larger top_k.
    """

    NONE = "no filters"
    SMALL_TOP_K = "filters"
    LARGE_TOP_K = "filters, large top_k"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockedTokens:
    """Tokens that must not be sampled in this step, as (row, token) pairs. N is padded.

    Some are blocked only if the last token, which the host may not have seen yet, has a given ID.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V).
      previous_row: i32[N], the engine row in [0, S) whose last token decides; -1 if the token is
        blocked unconditionally.
      previous_token: i32[N], in [0, V), the value of that last token for which ``ids`` is blocked;
        0 where ``previous_row`` is -1.
    """

    rows: Int32[Leaf, " n"]
    ids: Int32[Leaf, " n"]
    previous_row: Int32[Leaf, " n"]
    previous_token: Int32[Leaf, " n"]

    def resolved(self, last_tokens: LastTokens, num_rows: int) -> BlockedTokens:
        """Returns unconditional entries: if a condition does not hold, its entry is padding."""
        holds = last_tokens[self.previous_row] == self.previous_token
        is_blocked = (self.previous_row < 0) | holds
        return dataclasses.replace(
            self,
            rows=jnp.where(is_blocked, self.rows, num_rows),
            previous_row=jnp.full_like(self.previous_row, -1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BiasedTokens:
    """Values to add to the logits of single tokens. N is padded.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V), unique within a row.
      values: f32[N], finite.
    """

    rows: Int32[Leaf, " n"]
    ids: Int32[Leaf, " n"]
    values: Float32[Leaf, " n"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeenTokens:
    """The distinct tokens of the rows with penalties, one entry per row and token. N is padded.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V), unique within a row.
      counts: i32[N], how often the token was generated; 0 if only the prompt contains it.
      pending_row: i32[R], the engine row in [0, S) whose last token the host has not seen, so that
        it is not in ``counts``; -1 if the host has counted all tokens.
    """

    rows: Int32[Leaf, " n"]
    ids: Int32[Leaf, " n"]
    counts: Int32[Leaf, " n"]
    pending_row: Int32[Leaf, " rows"]

    def with_pending(self, last_tokens: LastTokens) -> SeenTokens:
        """Returns the entries with the pending tokens counted, and R additional entries.

        An additional entry is for a pending token that is new in its row, else padding.
        """
        num_rows = len(self.pending_row)
        pending = jnp.where(self.pending_row >= 0, last_tokens[self.pending_row], -1)
        matches = self.ids == pending.at[self.rows].get(mode="fill", fill_value=-1)
        is_listed = jnp.zeros(num_rows, jnp.int32).at[self.rows].max(matches, mode="drop") > 0
        is_extra = (pending >= 0) & ~is_listed
        return SeenTokens(
            rows=jnp.concatenate([self.rows, jnp.where(is_extra, jnp.arange(num_rows), num_rows)]),
            ids=jnp.concatenate([self.ids, jnp.maximum(pending, 0)]),
            counts=jnp.concatenate([self.counts + matches, jnp.ones(num_rows, jnp.int32)]),
            pending_row=jnp.full(num_rows, -1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """The parameters of each row of logits. R is padded.

    A stage whose input is None, or that ``filters`` leaves out, does not run.

    Attributes:
      kept_in_row: i32[R], the engine row in [0, S) that stores the sampled token as its last token.
        S drops the token: for padding, and for rows that do not sample.
      positions: i32[R], position of the sampled token in its request.
      seeds: u32[R, 2], low and high half of the 64-bit seed.
      temperature: f32[R], >= 0; 0 takes the most likely token.
      top_k: i32[R], in [1, V]; V is off.
      top_p: f32[R], in (0, 1]; 1 is off.
      min_p: f32[R], in [0, 1]; 0 is off.
      repetition: f32[R], > 0; 1 is off.
      frequency: f32[R]; 0 is off.
      presence: f32[R]; 0 is off.
      mask: u32[R, ceil(V / 32)] or None. Bit b of word w tells whether token 32 w + b may be
        sampled. Each row allows at least one token.
      biased: the biases of `SamplingParams.logit_bias`, or None.
      blocked: the tokens that `SamplingParams.bad_words_token_ids` and ``min_tokens`` forbid, or
        None.
      seen: the tokens that penalties count, or None.
      filters: static, the filters that run.
    """

    kept_in_row: Int32[Leaf, " rows"]
    positions: Int32[Leaf, " rows"]
    seeds: UInt32[Leaf, "rows 2"]
    temperature: Float32[Leaf, " rows"]
    top_k: Int32[Leaf, " rows"]
    top_p: Float32[Leaf, " rows"]
    min_p: Float32[Leaf, " rows"]
    repetition: Float32[Leaf, " rows"]
    frequency: Float32[Leaf, " rows"]
    presence: Float32[Leaf, " rows"]
    mask: UInt32[Leaf, "rows words"] | None = None
    biased: BiasedTokens | None = None
    blocked: BlockedTokens | None = None
    seen: SeenTokens | None = None
    filters: Filters = field(metadata={"static": True}, default=Filters.NONE)

    def without_tokens(self) -> SamplingInputs:
        """Returns the inputs without mask and token lists."""
        return dataclasses.replace(self, mask=None, biased=None, blocked=None, seen=None)

    def without_penalties(self) -> SamplingInputs:
        """Returns inputs of numpy arrays with padding in place of the tokens that penalties count.

        The token lists keep their shapes, so they run the same program.
        """
        assert self.seen is not None
        rows = np.full_like(self.seen.rows, len(self.positions))
        pending = np.full_like(self.seen.pending_row, -1)
        seen = dataclasses.replace(self.seen, rows=rows, pending_row=pending)
        return dataclasses.replace(self, seen=seen)

    def only_penalties(self) -> SamplingInputs:
        """Returns inputs of numpy arrays with padding in place of biases and blocked tokens."""
        assert self.biased is not None
        assert self.blocked is not None
        rows = np.full_like(self.biased.rows, len(self.positions))
        return dataclasses.replace(
            self,
            biased=dataclasses.replace(self.biased, rows=rows),
            blocked=dataclasses.replace(self.blocked, rows=rows),
        )

"""What the sampler is told about each row of logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.arrays import Leaf

SMALL_TOP_K = 64
"""Up to here top-k is found among the best groups of the vocabulary; beyond it, by bisection."""


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Stages that are needed for at least one row. Static: each value is a program of its own.

    Attributes:
      random: draw tokens; otherwise every row takes the most likely one.
      filters: apply min_p, top_p, and top_k up to `SMALL_TOP_K`.
      large_top_k: a row keeps more than `SMALL_TOP_K` tokens but not all.
      masked: `SamplingRows.mask` is set.
      biased: `SamplingRows.biased` is set.
      blocked: `SamplingRows.blocked` is set.
      penalties: `SamplingRows.seen` is set.
    """

    random: bool = False
    filters: bool = False
    large_top_k: bool = False
    masked: bool = False
    biased: bool = False
    blocked: bool = False
    penalties: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockedTokens:
    """Tokens that must not be sampled now, as pairs. N is padded.

    Some are blocked only after a certain token, which may be one that the host has not seen.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V).
      sources: i32[N], index into ``last_tokens`` of the token that decides, -1 for blocked anyway.
      after: i32[N], the token that must be there, in [0, V); 0 where ``sources`` is -1.
    """

    rows: Leaf
    ids: Leaf
    sources: Leaf
    after: Leaf

    def decided(self, last_tokens: jax.Array, num_rows: int) -> BlockedTokens:
        """The same with those that are not blocked after all turned into padding."""
        is_blocked = (self.sources < 0) | (last_tokens[self.sources] == self.after)
        return dataclasses.replace(
            self,
            rows=jnp.where(is_blocked, self.rows, num_rows),
            sources=jnp.full_like(self.sources, -1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BiasedTokens:
    """What is added to the logits of single tokens. N is padded.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V), unique within a row.
      values: f32[N], finite.
    """

    rows: Leaf
    ids: Leaf
    values: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeenTokens:
    """The distinct tokens of the requests with penalties, one entry a row and token. N is padded.

    Attributes:
      rows: i32[N], index into the rows of logits, in [0, R); padding R.
      ids: i32[N], in [0, V), unique within a row.
      counts: i32[N], how often the token was generated; 0 if it is in the prompt only.
      pending: i32[R], index into ``last_tokens`` of one more generated token of the row, which the
        host has not seen and not counted; -1 for none.
    """

    rows: Leaf
    ids: Leaf
    counts: Leaf
    pending: Leaf

    def with_pending(self, last_tokens: jax.Array) -> SeenTokens:
        """The same with the pending tokens counted, in R more entries."""
        num_rows = len(self.pending)
        pending = jnp.where(self.pending >= 0, last_tokens[self.pending], -1)
        matches = self.ids == pending.at[self.rows].get(mode="fill", fill_value=-1)
        is_listed = jnp.zeros(num_rows, jnp.int32).at[self.rows].max(matches, mode="drop") > 0
        is_extra = (pending >= 0) & ~is_listed
        return SeenTokens(
            rows=jnp.concatenate([self.rows, jnp.where(is_extra, jnp.arange(num_rows), num_rows)]),
            ids=jnp.concatenate([self.ids, jnp.maximum(pending, 0)]),
            counts=jnp.concatenate([self.counts + matches, jnp.ones(num_rows, jnp.int32)]),
            pending=jnp.full(num_rows, -1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """One entry per row of logits. R is padded.

    Attributes:
      targets: i32[R], where in ``last_tokens`` the sampled token goes; padding, and rows that do
        not sample, point past its end, which drops the token.
      positions: i32[R], position of the sampled token in its request.
      seeds: u32[R, 2], low and high half of the seed.
      temperature: f32[R], 0 for the most likely token.
      top_k: i32[R], in [1, V]; V is off.
      top_p: f32[R], in (0, 1]; 1 is off.
      min_p: f32[R], in [0, 1]; 0 is off.
      repetition: f32[R], > 0; 1 is off.
      frequency: f32[R]; 0 is off.
      presence: f32[R]; 0 is off.
      mask: u32[R, ceil(V / 32)], token 32 w + b may be sampled if bit b of word w is set, or None.
        Each row allows a token at least.
      biased: what `SamplingParams.logit_bias` adds, or None.
      blocked: what `SamplingParams.bad_words_token_ids` and ``min_tokens`` hold back, or None.
      seen: what the penalties count, or None.
    """

    targets: Leaf
    positions: Leaf
    seeds: Leaf
    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    repetition: Leaf
    frequency: Leaf
    presence: Leaf
    mask: Leaf | None = None
    biased: BiasedTokens | None = None
    blocked: BlockedTokens | None = None
    seen: SeenTokens | None = None

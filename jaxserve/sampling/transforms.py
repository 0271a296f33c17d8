"""The stages that change logits before a token is taken, one function each.

A stage maps logits f32[R, V] to logits of the same shape and does nothing, at no cost, unless
`SamplingFeatures` says that some row needs it. To add one: write the function, put it in the tuple
at its place, and give it what it needs to know about a row in `SamplingRows`.

Tokens are removed by setting their logit to -inf. Filters keep every token that ties with the last
one kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.sampling.rows import SMALL_TOP_K, SamplingFeatures, SamplingRows
from jaxserve.sampling.vocabulary import kth_largest, smallest_of_mass, top_k

Transform = Callable[[jax.Array, SamplingRows, SamplingFeatures], jax.Array]
"""(logits f32[R, V], rows, features) -> logits f32[R, V]"""


def keep_allowed(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Keeps the tokens that the mask allows."""
    if not features.masked:
        return logits
    assert rows.mask is not None
    bits = (rows.mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(logits), -1)[:, : logits.shape[1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)


def block_tokens(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Removes bad words, and the end tokens of requests that have not reached their min_tokens.

    Not where nothing would be left: a token has to be taken, and the mask knows better.
    """
    if not features.blocked:
        return logits
    assert rows.blocked is not None
    blocked = logits.at[rows.blocked.rows, rows.blocked.ids].set(-jnp.inf, mode="drop")
    return jnp.where(blocked.max(-1, keepdims=True) > -jnp.inf, blocked, logits)


def add_bias(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Adds the biases; what has been removed stays removed."""
    if not features.biased:
        return logits
    assert rows.biased is not None
    biased = rows.biased
    return logits.at[biased.rows, biased.ids].add(biased.values, mode="drop")


def penalise(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Repetition penalty over all tokens so far, then frequency and presence over the generated."""
    if not features.penalties:
        return logits
    assert rows.seen is not None
    seen = rows.seen
    values = logits.at[seen.rows, seen.ids].get(mode="fill", fill_value=0.0)
    repetition = rows.repetition[seen.rows]
    values = jnp.where(values > 0, values / repetition, values * repetition)
    values -= rows.frequency[seen.rows] * seen.counts
    values -= rows.presence[seen.rows] * (seen.counts > 0)
    return logits.at[seen.rows, seen.ids].set(values, mode="drop")


def scale_by_temperature(
    logits: jax.Array, rows: SamplingRows, features: SamplingFeatures
) -> jax.Array:
    """Divides by the temperature; greedy rows stay as they are."""
    return logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]


def keep_min_p(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Keeps tokens whose probability is at least min_p times that of the most likely one."""
    if not features.filters:
        return logits
    least = logits.max(-1) + jnp.log(rows.min_p)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def keep_top_k(logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> jax.Array:
    """Keeps the top_k most likely tokens."""
    if features.large_top_k:
        least = kth_largest(logits, rows.top_k)
    elif features.filters:
        best, _ = top_k(logits, min(SMALL_TOP_K, logits.shape[1]))
        last = jnp.minimum(rows.top_k, best.shape[1]) - 1
        least = jnp.take_along_axis(best, last[:, None], 1)[:, 0]
        least = jnp.where(rows.top_k < logits.shape[1], least, -jnp.inf)
    else:
        return logits
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def keep_top_p(logits: jax.Array, tokens: jax.Array, rows: SamplingRows) -> jax.Array:
    """Keeps the top_p set, for those who want to see it: `draw` does without.

    A token that was drawn belongs to it, also if sums that are rounded otherwise would say no.

    Args:
      logits: f32[R, V].
      tokens: i32[R], what was drawn.
      rows: per-row parameters.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    least = smallest_of_mass(logits, weights, rows.top_p * weights.sum(-1))
    drawn = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    least = jnp.where(rows.top_p < 1, jnp.minimum(least, drawn), -jnp.inf)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


ALWAYS: tuple[Transform, ...] = (keep_allowed, block_tokens, add_bias, penalise)
"""Stages that can change which token is the most likely, in order."""

BEFORE_DRAW: tuple[Transform, ...] = (scale_by_temperature, keep_min_p, keep_top_k)
"""Stages that cannot, in order; top-p comes last, as part of the draw."""

"""From the logits of a step to one token a row, in three functions that are compiled apart.

Few requests ask for more than the most likely token, and few of those for the same: so each
function runs only if it is needed and only for the rows that need it, and every combination is made
of the same few programs. A row's token is a function of its logits and its own entries in
``SamplingRows``: neighbours and the number of rows do not matter.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.sampling.draw import draw, row_keys
from jaxserve.sampling.rows import SamplingFeatures, SamplingRows
from jaxserve.sampling.transforms import ALWAYS, BEFORE_DRAW, keep_top_p
from jaxserve.sampling.vocabulary import argmax


def edit(
    logits: jax.Array, last_tokens: jax.Array, rows: SamplingRows, *, features: SamplingFeatures
) -> jax.Array:
    """What can change which token is the most likely: masks, blocked tokens, biases, penalties.

    Args:
      logits: f32[R, V], finite or -inf.
      last_tokens: i32[S], the last token sampled in each of the engine's rows.
      rows: per-row parameters.
      features: which stages are needed.

    Returns:
      f32[R, V], with at least one token of a row not -inf.
    """
    if rows.seen is not None:
        rows = dataclasses.replace(rows, seen=rows.seen.with_pending(last_tokens))
    if rows.blocked is not None:
        rows = dataclasses.replace(rows, blocked=rows.blocked.decided(last_tokens, len(logits)))
    for transform in ALWAYS:
        logits = transform(logits, rows, features)
    return logits


def choose(
    logits: jax.Array, rows: SamplingRows, *, features: SamplingFeatures
) -> tuple[jax.Array, jax.Array]:
    """Takes one token from each row of edited logits f32[R, V].

    Greedy rows take the most likely token. The others are divided by their temperature and drawn
    after min_p, top_k and top_p.

    Returns:
      (tokens i32[R], the logits f32[R, V] that they were drawn from, but for top_p).
    """
    tokens = argmax(logits)
    if features.random:
        for transform in BEFORE_DRAW:
            logits = transform(logits, rows, features)
        keys = row_keys(rows.seeds, rows.positions)
        drawn = draw(logits, keys, rows.top_p if features.filters else None)
        tokens = jnp.where(rows.temperature > 0, drawn, tokens)
    return tokens, logits


def processed(
    logits: jax.Array, tokens: jax.Array, rows: SamplingRows, *, features: SamplingFeatures
) -> jax.Array:
    """What `choose` returns, with top_p too: f32[R, V], -inf for what could not be drawn."""
    return keep_top_p(logits, tokens, rows) if features.filters else logits

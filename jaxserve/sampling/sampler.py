"""From the logits of a step to one token a row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.sampling.draw import draw, row_keys
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs
from jaxserve.sampling.rows import SamplingFeatures, SamplingRows
from jaxserve.sampling.transforms import ALWAYS, BEFORE_DRAW
from jaxserve.sampling.vocabulary import argmax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What a step sampled: tokens i32[R], and log probabilities if a row asked for them."""

    tokens: jax.Array
    logprobs: Logprobs | None


def sample(
    logits: jax.Array,
    last_tokens: jax.Array,
    rows: SamplingRows,
    *,
    features: SamplingFeatures,
) -> tuple[jax.Array, Sampled]:
    """Takes one token from each row of logits.

    In this order: log probabilities of the logits as they come, masks, blocked tokens, biases,
    penalties; greedy rows take the most likely token; the others are divided by their temperature
    and drawn after min_p, top_k and top_p. A row's token is a function of its logits and its own
    entries in ``rows``: neighbours and the number of rows do not matter.

    Args:
      logits: f32[R, V], finite or -inf.
      last_tokens: i32[S], the last token sampled in each of the engine's rows.
      rows: per-row parameters.
      features: which stages are needed.

    Returns:
      (last_tokens with the new tokens at ``rows.targets``, what was sampled).
    """
    if rows.seen is not None:
        rows = dataclasses.replace(rows, seen=rows.seen.with_pending(last_tokens))
    if rows.blocked is not None:
        rows = dataclasses.replace(rows, blocked=rows.blocked.decided(last_tokens, len(logits)))
    changed = logits
    for transform in ALWAYS:
        changed = transform(changed, rows, features)
    tokens = argmax(changed)
    if features.random:
        for transform in BEFORE_DRAW:
            changed = transform(changed, rows, features)
        keys = row_keys(rows.seeds, rows.positions)
        drawn = draw(changed, keys, rows.top_p if features.filters else None)
        tokens = jnp.where(rows.temperature > 0, drawn, tokens)
    logprobs = None
    if features.num_logprobs is not None:
        logprobs = compute_logprobs(logits, tokens, features.num_logprobs)
    return last_tokens.at[rows.targets].set(tokens, mode="drop"), Sampled(tokens, logprobs)

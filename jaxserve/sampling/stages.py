"""The stages that change logits before a token is taken, one function each.

A stage maps logits f32[R, V] to logits of the same shape. If its parameters are missing in
`SamplingInputs`, it does nothing and costs nothing. These are the stages whose parameters are
fields of `SamplingParams`; they share a few programs. All other stages declare themselves, as
`sampling.declaration` describes.

A stage removes a token by setting its logit to -inf. Filters keep every token that ties with the
last one kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.sampling.inputs import SMALL_TOP_K, Filters, SamplingInputs
from jaxserve.sampling.vocabulary import kth_largest, smallest_of_mass, top_k

Logits = Float32[Array, "rows vocab"]

StageFn = Callable[[Logits, SamplingInputs], Logits]
"""(logits f32[R, V], inputs) -> logits f32[R, V]"""


def keep_allowed(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Keeps the tokens that the mask allows."""
    if inputs.mask is None:
        return logits
    bits = (inputs.mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(logits), -1)[:, : logits.shape[1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)


def block_tokens(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Removes bad words, and the end tokens of requests that have not reached their min_tokens.

    A row keeps its tokens if none would be left: one must be sampled, and the mask has precedence.
    """
    if inputs.blocked is None:
        return logits
    blocked = logits.at[inputs.blocked.rows, inputs.blocked.ids].set(-jnp.inf, mode="drop")
    return jnp.where(blocked.max(-1, keepdims=True) > -jnp.inf, blocked, logits)


def add_bias(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Adds the biases. Removed tokens stay removed."""
    if inputs.biased is None:
        return logits
    biased = inputs.biased
    return logits.at[biased.rows, biased.ids].add(biased.values, mode="drop")


def penalise(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Applies the repetition penalty, then the frequency and presence penalties.

    The first applies to all tokens so far, the other two to the generated tokens.
    """
    if inputs.seen is None:
        return logits
    seen = inputs.seen
    values = logits.at[seen.rows, seen.ids].get(mode="fill", fill_value=0.0)
    repetition = inputs.repetition[seen.rows]
    values = jnp.where(values > 0, values / repetition, values * repetition)
    values -= inputs.frequency[seen.rows] * seen.counts
    values -= inputs.presence[seen.rows] * (seen.counts > 0)
    return logits.at[seen.rows, seen.ids].set(values, mode="drop")


def scale_by_temperature(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Divides each row by its temperature. Greedy rows stay the same."""
    return logits / jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]


def keep_min_p(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Keeps the tokens whose probability is at least min_p times that of the most likely one."""
    if inputs.filters is Filters.NONE:
        return logits
    least = logits.max(-1) + jnp.log(inputs.min_p)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def keep_top_k(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Keeps the top_k most likely tokens."""
    if inputs.filters is Filters.NONE:
        return logits
    if inputs.filters is Filters.LARGE_TOP_K:
        least = kth_largest(logits, inputs.top_k)
    else:
        best, _ = top_k(logits, min(SMALL_TOP_K, logits.shape[1]))
        last = jnp.minimum(inputs.top_k, best.shape[1]) - 1
        least = jnp.take_along_axis(best, last[:, None], 1)[:, 0]
        least = jnp.where(inputs.top_k < logits.shape[1], least, -jnp.inf)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def keep_top_p(logits: Logits, tokens: Int32[Array, " rows"], inputs: SamplingInputs) -> Logits:
    """Keeps the top-p set. Only log probabilities need it: `draw` does not compute the set.

    The set includes the drawn token even if differently rounded sums would exclude it.

    Args:
      logits: f32[R, V].
      tokens: i32[R], the drawn tokens.
      inputs: the parameters of each row.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    least = smallest_of_mass(logits, weights, inputs.top_p * weights.sum(-1))
    drawn = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    least = jnp.where(inputs.top_p < 1, jnp.minimum(least, drawn), -jnp.inf)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


LOGITS_PROCESSORS: tuple[StageFn, ...] = (keep_allowed, block_tokens, add_bias, penalise)
"""Stages that can change which token is the most likely, in order. Declared logits processors run
before `penalise`.
"""

SAMPLING_FILTERS: tuple[StageFn, ...] = (keep_min_p, keep_top_k)
"""Stages that always keep the most likely token, in order. They see logits divided by the
temperature. Declared filters run before `keep_top_k`. The draw applies top-p after all of them.
"""

"""Turns logits into one token per row, in three functions that are compiled separately.

Few requests ask for more than the most likely token, and those that do ask for different things.
Each function therefore runs only if a row needs it, on the rows that need the sampler. All
combinations of features share the same few programs. The token of a row depends only on its logits
and its own entries in `SamplingInputs`, not on its neighbours or on the number of rows.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.sampling.draw import draw, row_keys
from jaxserve.sampling.inputs import Filters, LastTokens, SamplingInputs
from jaxserve.sampling.stages import (
    LOGITS_PROCESSORS,
    SAMPLING_FILTERS,
    Logits,
    keep_min_p,
    keep_top_p,
    scale_by_temperature,
)
from jaxserve.sampling.vocabulary import argmax


def process_logits(logits: Logits, last_tokens: LastTokens, inputs: SamplingInputs) -> Logits:
    """Applies the stages that can change which token is the most likely.

    Args:
      logits: f32[R, V], finite or -inf.
      last_tokens: i32[S], the last token of each engine row.
      inputs: the parameters of each row.

    Returns:
      f32[R, V]; each row has at least one value above -inf.
    """
    if inputs.seen is not None:
        inputs = dataclasses.replace(inputs, seen=inputs.seen.with_pending(last_tokens))
    if inputs.blocked is not None:
        blocked = inputs.blocked.resolved(last_tokens, len(logits))
        inputs = dataclasses.replace(inputs, blocked=blocked)
    for stage in LOGITS_PROCESSORS:
        logits = stage(logits, inputs)
    return logits


def prepare_filters(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Divides logits f32[R, V] by the temperature and applies min_p.

    This is the first part of `sample`, for steps with declared filters, which run after it.
    """
    inputs = dataclasses.replace(inputs, filters=Filters.SMALL_TOP_K)
    return keep_min_p(scale_by_temperature(logits, inputs), inputs)


def sample(logits: Logits, inputs: SamplingInputs) -> tuple[Int32[Array, " rows"], Logits]:
    """Takes one token from each row of processed logits f32[R, V].

    A greedy row gives its most likely token. The logits of other rows are divided by the
    temperature and filtered by min_p, top_k and top_p before a token is drawn.

    Returns:
      (tokens i32[R], the logits f32[R, V] that they were drawn from, before top_p).
    """
    most_likely = argmax(logits)
    logits = scale_by_temperature(logits, inputs)
    for stage in SAMPLING_FILTERS:
        logits = stage(logits, inputs)
    keys = row_keys(inputs.seeds, inputs.positions)
    drawn = draw(logits, keys, None if inputs.filters is Filters.NONE else inputs.top_p)
    return jnp.where(inputs.temperature > 0, drawn, most_likely), logits


def filtered_logits(
    logits: Logits, tokens: Int32[Array, " rows"], inputs: SamplingInputs
) -> Logits:
    """Applies top_p to the logits and tokens that `sample` returns.

    Returns:
      f32[R, V]; -inf for every token that could not be drawn.
    """
    return logits if inputs.filters is Filters.NONE else keep_top_p(logits, tokens, inputs)

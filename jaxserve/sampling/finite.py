"""Tells the host which logits of a model are not finite, without a transfer of its own.

Damaged weights, and activations that overflow in float16, give logits that are NaN or infinite. The
token that is taken from them means nothing. The host receives one token of each row in every step,
so the mark is in that token: a *marked* token is ``~token``, which is negative.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.sampling.vocabulary import GROUP, grouped


def marked_argmax(logits: Float32[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """Returns the `argmax` of logits f32[R, V]. Marks the tokens of rows that are not finite.

    A group with a logit that is not finite counts as infinitely large, so the search for the best
    group finds it on the way, without a further pass over the logits on a GPU.
    """
    groups = grouped(logits)
    maxima = lax.platform_dependent(logits, cpu=maxima_in_two_passes, default=maxima_in_one_pass)
    key, best = _max_and_argmax(maxima)
    members = jnp.take_along_axis(groups, best[:, None, None], 1)[:, 0]
    tokens = best * GROUP + jnp.argmax(members, -1).astype(jnp.int32)
    return marked(tokens, key < jnp.inf)


def maxima_in_one_pass(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows groups"]:
    """Returns the largest logit of each group of 128, or infinity if one is not finite."""
    return grouped(jnp.where(jnp.isfinite(logits), logits, jnp.inf)).max(-1)


def maxima_in_two_passes(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows groups"]:
    """Returns `maxima_in_one_pass` with a second pass over the logits, which on a CPU is faster.

    XLA:CPU computes sums and maxima in vectors, but not if they are of the result of a test.
    """
    return jnp.where(_are_finite(logits), grouped(logits).max(-1), jnp.inf)


def all_finite(logits: Float32[Array, "rows vocab"]) -> Bool[Array, " rows"]:
    """Returns whether all logits f32[R, V] of each row are finite, as bool[R]."""
    return _are_finite(logits).all(-1)


def marked(tokens: Int32[Array, " rows"], is_finite: Bool[Array, " rows"]) -> Int32[Array, " rows"]:
    """Marks the tokens i32[R] of the rows whose logits are not finite, given bool[R]."""
    return jnp.where(is_finite, tokens, ~tokens)


def without_marks(tokens: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Returns tokens i32[R] in [0, V), of which some were marked."""
    return jnp.where(tokens < 0, ~tokens, tokens)


def _are_finite(logits: Float32[Array, "rows vocab"]) -> Bool[Array, "rows groups"]:
    """Returns whether the logits of each group of 128 are finite.

    NaN and infinities of both signs get through a sum. The sum of finite logits is finite unless
    some are above 1e36.
    """
    return jnp.isfinite(grouped(logits, fill=0.0).sum(-1))


def _max_and_argmax(
    keys: Float32[Array, "rows groups"],
) -> tuple[Float32[Array, " rows"], Int32[Array, " rows"]]:
    """Returns the largest key of each row, and its first index. No key is NaN."""

    def larger(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        (key, index), (other, other_index) = first, second
        wins = (key > other) | ((key == other) & (index < other_index))
        return jnp.where(wins, key, other), jnp.where(wins, index, other_index)

    indices = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    start = (jnp.float32(-jnp.inf), jnp.int32(keys.shape[1]))
    key, index = lax.reduce((keys, indices), start, larger, (1,))
    return key, index

"""Searches over the vocabulary that avoid sorting it.

The vocabulary is cut into groups of 128. The best k tokens all lie in the k groups with the best
maxima, so that after one pass for the maxima only those groups have to be looked at. Ties go to the
lowest id, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 128


def grouped(values: jax.Array) -> jax.Array:
    """f32[R, V] as f32[R, G, 128], padded with -inf if V is not a multiple of 128."""
    rows, width = values.shape
    missing = -width % GROUP
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return values.reshape(rows, -1, GROUP)


def argmax(values: jax.Array) -> jax.Array:
    """i32[R]: the index of the largest of f32[R, V] in each row; of a NaN, if there is one."""
    groups = grouped(values)
    best = jnp.argmax(groups.max(-1), -1).astype(jnp.int32)
    members = jnp.take_along_axis(groups, best[:, None, None], 1)[:, 0]
    return best * GROUP + jnp.argmax(members, -1).astype(jnp.int32)


def top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of f32[R, V] in each row, in descending order; -0 comes after 0.

    Returns:
      (values f32[R, k], indices i32[R, k]).
    """
    groups = grouped(values)
    if groups.shape[1] <= k:
        found, where = lax.top_k(values, k)
        return found, where
    _, best = lax.top_k(groups.max(-1), k)
    # In ascending order, so that among equals in the candidates the lowest id comes first.
    best = jnp.sort(best, -1)
    candidates = jnp.take_along_axis(groups, best[:, :, None], 1).reshape(len(values), -1)
    found, where = lax.top_k(candidates, k)
    return found, jnp.take_along_axis(best, where // GROUP, 1) * GROUP + where % GROUP


def kth_largest(values: jax.Array, k: jax.Array) -> jax.Array:
    """f32[R]: the k-th largest of f32[R, V] in each row, k i32[R] in [1, V]. -0 counts as 0."""
    return _largest_with(values, lambda is_above: is_above.sum(-1) >= k)


def smallest_of_mass(values: jax.Array, weights: jax.Array, mass: jax.Array) -> jax.Array:
    """f32[R]: the last of the values, in descending order, that it takes to reach a mass.

    Args:
      values: f32[R, V].
      weights: f32[R, V], at least 0.
      mass: f32[R], of weights.
    """
    return _largest_with(values, lambda is_above: jnp.where(is_above, weights, 0).sum(-1) >= mass)


def _largest_with(values: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest value of each row such that those not smaller than it, bool[R, V], are enough;
    the smallest one if there is none.

    Bisection over the bits of the floats: exact, at most 32 passes over the values.
    """
    ordered = _to_ordered(jnp.where(values == 0, 0.0, values))
    # The midpoint is taken without the sum, which would overflow.
    low, high = ordered.min(-1), ordered.max(-1)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = is_enough(ordered >= middle[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return _from_ordered(low)


def _to_ordered(values: jax.Array) -> jax.Array:
    """Integers in the order of the floats."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(ordered: jax.Array) -> jax.Array:
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)

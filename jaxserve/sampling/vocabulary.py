"""Searches over the vocabulary that avoid sorting it.

The vocabulary is cut into groups of 128. The best k tokens all lie in the k groups with the best
maxima, so one pass for the maxima is enough to find the groups to search. Of equal values, the one
with the lowest id always comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

GROUP = 128

Values = Float32[Array, "rows vocab"]


def grouped(values: Values, *, fill: float = -jnp.inf) -> Float32[Array, "rows groups 128"]:
    """Returns f32[R, V] as f32[R, G, 128], padded with ``fill`` if V is not a multiple of 128."""
    rows, width = values.shape
    missing = -width % GROUP
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
    return values.reshape(rows, -1, GROUP)


def argmax(values: Values) -> Int32[Array, " rows"]:
    """Returns the index of the largest value of each row; any index if the row has a NaN."""
    groups = grouped(values)
    best = jnp.argmax(groups.max(-1), -1).astype(jnp.int32)
    members = jnp.take_along_axis(groups, best[:, None, None], 1)[:, 0]
    return best * GROUP + jnp.argmax(members, -1).astype(jnp.int32)


def top_k(values: Values, k: int) -> tuple[Float32[Array, "rows {k}"], Int32[Array, "rows {k}"]]:
    """Returns the k largest values of each row in descending order, and their indices.

    -0 comes after 0. ``k`` is in [1, V].
    """
    groups = grouped(values)
    if groups.shape[1] <= k:
        found, indices = lax.top_k(values, k)
        return found, indices
    _, best = lax.top_k(groups.max(-1), k)
    # Groups in ascending order make the lowest id come first among equal candidates.
    best = jnp.sort(best, -1)
    candidates = jnp.take_along_axis(groups, best[:, :, None], 1).reshape(len(values), -1)
    found, where = lax.top_k(candidates, k)
    return found, jnp.take_along_axis(best, where // GROUP, 1) * GROUP + where % GROUP


def kth_largest(values: Values, k: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    """Returns the k-th largest value of each row, with k in [1, V]. -0 counts as 0."""
    return _largest_with(values, lambda is_above: is_above.sum(-1) >= k)


def smallest_of_mass(
    values: Values, weights: Values, mass: Float32[Array, " rows"]
) -> Float32[Array, " rows"]:
    """Returns the value at which the sum of weights, in descending order of values, reaches a mass.

    Args:
      values: f32[R, V].
      weights: f32[R, V], at least 0.
      mass: f32[R]. For a row whose weights do not reach it, the result is its smallest value.
    """
    return _largest_with(values, lambda is_above: jnp.where(is_above, weights, 0).sum(-1) >= mass)


def _largest_with(
    values: Values, is_enough: Callable[[Bool[Array, "rows vocab"]], Bool[Array, " rows"]]
) -> Float32[Array, " rows"]:
    """Returns the largest value x of each row for which ``is_enough(values >= x)`` holds.

    If there is none, returns the smallest value of the row. The bisection over the bits of the
    floats is exact and takes at most 32 passes over the values.
    """
    ordered = _to_ordered(jnp.where(values == 0, 0.0, values))
    low, high = ordered.min(-1), ordered.max(-1)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The midpoint, rounded up. The sum of both could overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = is_enough(ordered >= middle[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return _from_ordered(low)


def _to_ordered(values: Values) -> Int32[Array, "rows vocab"]:
    """Returns integers that sort like the floats."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(ordered: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    """Inverts `_to_ordered`."""
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)

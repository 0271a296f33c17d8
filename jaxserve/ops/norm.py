"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Divides each vector by its root mean square, then scales it.

    Args:
      x: [..., D], any float dtype; the mean is taken in float32.
      weight: [D].
      eps: added to the mean of the squares.

    Returns:
      [..., D] in x's dtype.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return weight * (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)

"""Functions of single elements or single vectors: activations and normalisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions by the names that model configs give them."""


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

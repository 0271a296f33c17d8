"""Functions of single elements or single vectors: activations and normalisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions by the names that model configs use."""


def rms_norm(
    x: Float[Array, "*batch size"],
    weight: Float[Array, " size"],
    *,
    eps: float,
    offset: float = 0.0,
) -> Float[Array, "*batch size"]:
    """Divides each vector by its root mean square, then scales it.

    Args:
      x: [..., D], any float dtype; the mean is computed in float32.
      weight: [D], in x's dtype.
      eps: added to the mean of the squares.
      offset: added to the weight. With an offset, as Gemma has, the product is in float32.

    Returns:
      [..., D] in x's dtype.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normalised = wide * jax.lax.rsqrt(mean_square + eps)
    if offset:
        return (normalised * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return weight * normalised.astype(x.dtype)

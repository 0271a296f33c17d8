"""Rotary position embedding, and the scalings that stretch it to longer contexts.

The frequencies depend on the model and, for `DynamicScaling`, on the token's own position. They
depend neither on the chunks that a prompt is cut into nor on the contents of the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by ``factor``, keeps high ones and blends between (Llama 3.1).

    Attributes:
      factor: divides the low frequencies.
      low_freq_factor: the most turns over the original context of a low frequency.
      high_freq_factor: the fewest turns over the original context of a high frequency.
      original_length: the context length in tokens of the original training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divides low frequencies by ``factor``, keeps high ones, with a linear ramp between.

    Attributes:
      factor: divides the low frequencies.
      original_length: the context length in tokens of the original training.
      attention_factor: multiplies cosines and sines, so that its square multiplies the scores.
      beta_fast: the fewest turns over the original context of a high frequency.
      beta_slow: the most turns over the original context of a low frequency.
      truncate: rounds the ends of the ramp to whole pairs of dimensions.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Raises the base of the frequencies when the context is longer than ``original_length``.

    The context of a token ends with the token itself, so tokens within the original length are
    rotated as without scaling. `transformers` computes the same while it generates token by token.
    But if it gets a long prompt in one call, it rotates all tokens by the full length. Then a
    token's key depends on later tokens and cannot be cached.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Divides each of the head_dim / 2 frequencies by its own factor."""

    factors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | FactorScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of queries and keys.

    Attributes:
      theta: base of the frequencies.
      head_dim: size of a head, even.
      scaling: stretches the rotation to longer contexts; None for no scaling.
    """

    theta: float
    head_dim: int
    scaling: Scaling | None = None


def cos_sin(
    positions: Int32[Array, " tokens"], rope: Rope
) -> tuple[Float32[Array, "tokens half_head_dim"], Float32[Array, "tokens half_head_dim"]]:
    """Returns the cosines and sines f32[T, H / 2] of the rotation at each position i32[T]."""
    column = positions.astype(jnp.float32)[:, None]
    if isinstance(rope.scaling, DynamicScaling):
        frequencies = _dynamic_frequencies(column, rope, rope.scaling)
    else:
        frequencies = jnp.asarray(fixed_frequencies(rope))
    angles = column * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, YarnScaling):
        factor = rope.scaling.attention_factor
        cos, sin = cos * factor, sin * factor
    return cos, sin


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens half_head_dim"],
    sin: Float32[Array, "tokens half_head_dim"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates dimension i together with dimension i + H / 2, in float32.

    Args:
      x: [T, heads, H], any float dtype.
      cos, sin: f32[T, H / 2], from `cos_sin`.

    Returns:
      [T, heads, H] in x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)


def fixed_frequencies(rope: Rope) -> Float32[np.ndarray, " half_head_dim"]:
    """Returns the frequency of each pair of dimensions in radians per position, f32[H / 2].

    Raises:
      AssertionError: the scaling is `DynamicScaling`, whose frequencies depend on the position.
    """
    unscaled = (1.0 / rope.theta ** _exponents(rope.head_dim)).astype(np.float32)
    match rope.scaling:
        case None:
            return unscaled
        case LinearScaling(factor):
            return unscaled / np.float32(factor)
        case FactorScaling(factors):
            return unscaled / np.asarray(factors, np.float32)
        case Llama3Scaling():
            return _llama3_frequencies(unscaled, rope.scaling)
        case YarnScaling():
            return _yarn_frequencies(unscaled, rope, rope.scaling)
        case _:
            raise AssertionError(f"{rope.scaling} has no fixed frequencies")


def _exponents(head_dim: int) -> Float32[np.ndarray, " half_head_dim"]:
    return np.arange(0, head_dim, 2, dtype=np.float32) / head_dim


def _llama3_frequencies(
    unscaled: Float32[np.ndarray, " half_head_dim"], scaling: Llama3Scaling
) -> Float32[np.ndarray, " half_head_dim"]:
    turns = scaling.original_length * unscaled / (2 * np.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (kept * unscaled + (1 - kept) * unscaled / scaling.factor).astype(np.float32)


def _yarn_frequencies(
    unscaled: Float32[np.ndarray, " half_head_dim"], rope: Rope, scaling: YarnScaling
) -> Float32[np.ndarray, " half_head_dim"]:
    def dimension_with(turns: float) -> float:
        """Returns the pair of dimensions that makes this many turns over the original context."""
        wavelength = scaling.original_length / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = np.clip((np.arange(rope.head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return (ramp * unscaled / scaling.factor + (1 - ramp) * unscaled).astype(np.float32)


def _dynamic_frequencies(
    positions: Float32[Array, "tokens 1"], rope: Rope, scaling: DynamicScaling
) -> Float32[Array, "tokens half_head_dim"]:
    length = jnp.maximum(positions + 1, scaling.original_length)
    growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
    base = rope.theta * growth ** (rope.head_dim / (rope.head_dim - 2))
    return 1.0 / base ** jnp.asarray(_exponents(rope.head_dim))

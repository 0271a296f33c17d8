"""Rotary position embedding, and the ways in which models stretch it to longer contexts.

Every frequency depends on nothing but the model and, for `Dynamic`, the position of the token: how
a prompt was cut into chunks, or what is in the cache already, cannot change a rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Linear:
    """All frequencies divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided by ``factor``, high ones kept, a smooth passage between (Llama 3.1).

    ``original_length`` is the context in tokens that the model was first trained for.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Low frequencies divided by ``factor``, high ones kept, a linear ramp between.

    ``attention_factor`` scales cosines and sines, and so, squared, the attention scores.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The base grows with the length of the text beyond ``original_length`` tokens.

    The length that counts is that of the text up to the token itself, so a token within the
    original length is rotated exactly as without scaling. This is what `transformers` computes
    while it generates token by token; given a long text at once it rotates all of it by the whole
    length, which makes a token's key depend on what comes after it, so that it cannot be cached.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class Factors:
    """Each frequency divided by a number of its own; ``factors`` has head_dim / 2 of them."""

    factors: tuple[float, ...]


Scaling = Linear | Llama3 | Yarn | Dynamic | Factors


@dataclass(frozen=True, slots=True)
class Rope:
    """How queries and keys of ``head_dim`` (even) are rotated; ``theta`` is the base."""

    theta: float
    head_dim: int
    scaling: Scaling | None = None


def cos_sin(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotation of each token.

    Args:
      positions: i32[T].

    Returns:
      Two f32[T, head_dim / 2].
    """
    at = positions.astype(jnp.float32)[:, None]
    if isinstance(rope.scaling, Dynamic):
        frequencies = _dynamic_frequencies(at, rope, rope.scaling)
    else:
        frequencies = jnp.asarray(fixed_frequencies(rope))
    angles = at * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, Yarn):
        factor = rope.scaling.attention_factor
        cos, sin = cos * factor, sin * factor
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates dimension i together with dimension i + head_dim / 2.

    Args:
      x: [T, heads, head_dim], any float dtype.
      cos, sin: f32[T, head_dim / 2], from `cos_sin`.

    Returns:
      The shape and dtype of x; computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def fixed_frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each pair of dimensions: f32[head_dim / 2]; not for `Dynamic`."""
    plain = (1.0 / rope.theta ** _exponents(rope.head_dim)).astype(np.float32)
    match rope.scaling:
        case None:
            return plain
        case Linear(factor):
            return plain / np.float32(factor)
        case Factors(factors):
            return plain / np.asarray(factors, np.float32)
        case Llama3():
            return _llama3_frequencies(plain, rope.scaling)
        case Yarn():
            return _yarn_frequencies(plain, rope, rope.scaling)
        case _:
            raise AssertionError(f"{rope.scaling} has no fixed frequencies")


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / head_dim


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3) -> np.ndarray:
    turns = scaling.original_length * plain / (2 * np.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (kept * plain + (1 - kept) * plain / scaling.factor).astype(np.float32)


def _yarn_frequencies(plain: np.ndarray, rope: Rope, scaling: Yarn) -> np.ndarray:
    def dimension_with(turns: float) -> float:
        """The pair of dimensions that turns so many times over the original context."""
        wavelength = scaling.original_length / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return (ramp * plain / scaling.factor + (1 - ramp) * plain).astype(np.float32)


def _dynamic_frequencies(at: jax.Array, rope: Rope, scaling: Dynamic) -> jax.Array:
    """f32[T, head_dim / 2] for positions ``at`` f32[T, 1]."""
    length = jnp.maximum(at + 1, scaling.original_length)
    growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
    base = rope.theta * growth ** (rope.head_dim / (rope.head_dim - 2))
    return 1.0 / base ** jnp.asarray(_exponents(rope.head_dim))

"""Conversion of keys and values to entries of the cache, in every dtype of `limits.CACHE_DTYPES`.

A float8 entry is the value itself, rounded. Arrays of uint8 hold the bits of such entries. An int8
entry is the value divided by a scale. There is one scale for each slot and KV head, computed from
the vector that is written: its largest magnitude becomes 127. So no calibration is needed, and a
large value in one token does not change the precision of others.

These are plain jax operations, which also run inside a kernel.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

INT8_MAX = 127.0
FLOAT8_MAX = 448.0
"""The largest float8_e4m3fn. A larger value would become NaN, because the dtype has no infinity."""


def has_scales(cache_dtype: DTypeLike) -> bool:
    """Returns whether the entries of a cache of this dtype need scales."""
    return jnp.dtype(cache_dtype) == jnp.int8


def quantize(
    x: Float[Array, "*batch head_dim"], cache_dtype: DTypeLike
) -> tuple[Num[Array, "*batch head_dim"], Float32[Array, "*batch"] | None]:
    """Returns the cache entries of vectors, and their scales if the dtype needs them.

    Args:
      x: [..., head_dim], any float dtype. NaN and infinity stay visible: they make the scale or
        an entry NaN or infinite. Only float8 clips infinity to its largest value.
      cache_dtype: a dtype of `limits.CACHE_DTYPES`.

    Returns:
      Entries [..., head_dim] in ``cache_dtype``, and scales f32[...] or None. Entries times scale
      differ from the vector by at most half a scale.
    """
    if has_scales(cache_dtype):
        x = x.astype(jnp.float32)
        scale = jnp.max(jnp.abs(x), axis=-1) / INT8_MAX
        divisor = jnp.where(scale > 0, scale, 1.0)  # a vector of zeros has the scale 0
        # A conversion to an integer truncates. The clip is for scales that are subnormal numbers.
        entries = jnp.floor(x / divisor[..., None] + 0.5)
        return jnp.clip(entries, -INT8_MAX, INT8_MAX).astype(cache_dtype), scale
    if jnp.dtype(cache_dtype) in (jnp.float8_e4m3fn, jnp.uint8):
        clipped = jnp.clip(x.astype(jnp.float32), -FLOAT8_MAX, FLOAT8_MAX)
        entries = clipped.astype(jnp.float8_e4m3fn)
        return (as_bits(entries) if cache_dtype == jnp.uint8 else entries), None
    return x.astype(cache_dtype), None


def dequantize(
    entries: Num[Array, "*batch head_dim"], scale: Float32[Array, "*batch"] | None
) -> Float32[Array, "*batch head_dim"]:
    """Returns the vectors f32[..., head_dim] of cache entries and their scales."""
    x = from_bits(entries).astype(jnp.float32)
    return x if scale is None else x * scale[..., None]


def as_bits(entries: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Returns float8 entries as their bits, of dtype uint8, and all other entries unchanged."""
    if entries.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(entries, jnp.uint8)
    return entries


def from_bits(entries: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Returns the inverse of `as_bits`."""
    if entries.dtype == jnp.uint8:
        return lax.bitcast_convert_type(entries, jnp.float8_e4m3fn)
    return entries

"""The shapes and dtypes that the kernels support, and checks that raise for all others.

The entry points of the kernels raise ValueError if the sizes of their arguments do not fit
together. The annotations of such arguments therefore give only rank and dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Num

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
MAX_GROUP = 128
DTYPES = ("bfloat16", "float16", "float32")
QUANTIZED_DTYPES = ("float8_e4m3fn", "int8")
CACHE_DTYPES = DTYPES + QUANTIZED_DTYPES

QUANTIZED_MAX = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest magnitude that a quantised cache entry can hold."""

Cache = Num[Array, "layers blocks block_size kv_heads head_dim"]
"""The keys or the values of all layers, in a dtype of `CACHE_DTYPES`."""

Scales = Float32[Array, "_ _"]
"""f32[num_layers, num_kv_heads]: the factor of the cache entries of each layer and KV head."""

LayerIndex = Int32[Array, ""] | int
"""The index of a layer in the cache, in [0, num_layers); may be traced."""


def is_quantized(cache_dtype: DTypeLike) -> bool:
    """Returns whether a cache of this dtype holds 8-bit entries."""
    return jnp.dtype(cache_dtype).name in QUANTIZED_DTYPES


def dot_dtype(dtype: DTypeLike, cache_dtype: DTypeLike) -> DTypeLike:
    """Returns the operand dtype of the matrix products, which holds queries and cache exactly."""
    if is_quantized(cache_dtype):
        return dtype  # every dtype of `DTYPES` holds every 8-bit entry exactly
    return jnp.promote_types(dtype, cache_dtype)


def check_supported(
    *,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
) -> None:
    """Raises ValueError unless the kernels support these sizes and dtypes."""
    _check_one_of("head_dim", head_dim, HEAD_DIMS)
    _check_one_of("block_size", block_size, BLOCK_SIZES)
    check_dtype("dtype", dtype)
    _check_one_of("dtype of the cache", jnp.dtype(cache_dtype).name, CACHE_DTYPES)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
    if num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"at most {MAX_GROUP} query heads may share a KV head, "
            f"got {num_heads // num_kv_heads} ({num_heads} / {num_kv_heads})"
        )


def check_cache(
    k_cache: Cache,
    v_cache: Cache,
    k_scale: Scales | None,
    v_scale: Scales | None,
) -> None:
    """Checks a cache and the scales of its entries.

    Args:
      k_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
      v_cache: the same shape and dtype.
      k_scale: f32[num_layers, num_kv_heads] for an 8-bit cache, or None.
      v_scale: the same for the values.

    Raises:
      ValueError: the caches differ, or have a size that the kernels cannot address, or the scales
        do not fit the caches. An int8 cache must have scales: its integers mean nothing without
        them.
    """
    if k_cache.ndim != 5 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "the two caches must be arrays [num_layers, num_blocks, block_size, num_kv_heads, "
            f"head_dim] of the same shape and dtype, got {k_cache.shape} {k_cache.dtype} and "
            f"{v_cache.shape} {v_cache.dtype}"
        )
    # The backend counts offsets in elements. For arrays of up to 2**32 bytes, an offset has 32 bits
    # including the sign: enough for entries of two bytes or more, too few for entries of one byte.
    if k_cache.dtype.itemsize == 1 and 2**31 < k_cache.size <= 2**32:
        raise ValueError(
            f"each array of an 8-bit cache must be smaller than 2 GiB or larger than 4 GiB, got "
            f"{k_cache.size} bytes: change the number of blocks"
        )
    shape = (k_cache.shape[0], k_cache.shape[3])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not is_quantized(k_cache.dtype):
            raise ValueError(f"{name} must be None for a cache of {k_cache.dtype.name}")
        if scale is None and k_cache.dtype == jnp.int8:
            raise ValueError(f"{name} must have shape {shape} for an int8 cache, got None")
        if scale is not None:
            check_shape(name, scale, shape)


def check_dtype(what: str, dtype: DTypeLike) -> None:
    """Raises ValueError unless ``dtype`` is one of `DTYPES`."""
    _check_one_of(what, jnp.dtype(dtype).name, DTYPES)


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless ``array`` has the given shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")


def _check_one_of(what: str, value: int | str, supported: tuple[int | str, ...]) -> None:
    if value not in supported:
        names = ", ".join(str(s) for s in supported)
        raise ValueError(f"{what} {value} is not supported: expected one of {names}")

"""The shapes and dtypes that the kernels support, and checks that raise for all others.

The entry points of the kernels raise ValueError if the sizes of their arguments do not fit
together. The annotations of such arguments therefore give only rank and dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Num

from pallas_kernels.quantization import has_scales

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
MAX_GROUP = 128
DTYPES = ("bfloat16", "float16", "float32")
QUANTIZED_DTYPES = ("float8_e4m3fn", "int8")
CACHE_DTYPES = DTYPES + QUANTIZED_DTYPES

Cache = Num[Array, "layers blocks block_size kv_heads head_dim"]
"""The keys or the values of all layers, in a dtype of `CACHE_DTYPES`."""

Scales = Float32[Array, "_ _ _ _"]
"""f32[num_layers, num_blocks, block_size, num_kv_heads]: the factors of the entries of a cache of
int8 (`quantization`). Slots without a live token may hold anything, NaN included.
"""

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
      k_scale: `Scales` if the cache is int8, else None.
      v_scale: the same for the values.

    Raises:
      ValueError: the caches differ, or have a size that the kernels cannot address, or the scales
        do not fit the caches.
    """
    if k_cache.ndim != 5 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "the two caches must be arrays [num_layers, num_blocks, block_size, num_kv_heads, "
            f"head_dim] of the same shape and dtype, got {k_cache.shape} {k_cache.dtype} and "
            f"{v_cache.shape} {v_cache.dtype}"
        )
    check_addressable(k_cache.size, k_cache.dtype)
    shape = k_cache.shape[:-1]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not has_scales(k_cache.dtype):
            if scale is not None:
                raise ValueError(f"{name} must be None for a cache of {k_cache.dtype.name}")
        elif scale is None:
            raise ValueError(f"{name} must have shape {shape} for an int8 cache, got None")
        else:
            check_shape(name, scale, shape)


def check_addressable(num_entries: int, cache_dtype: DTypeLike) -> None:
    """Raises ValueError unless the kernels can address keys or values of this many entries."""
    # The backend counts offsets in elements. For arrays of up to 2**32 bytes, an offset has 32 bits
    # including the sign: enough for entries of two bytes or more, too few for entries of one byte.
    if jnp.dtype(cache_dtype).itemsize == 1 and 2**31 < num_entries <= 2**32:
        raise ValueError(
            "the keys of an 8-bit cache must take at most 2 GiB or more than 4 GiB, got "
            f"{num_entries / 2**30:.2f} GiB; change the number of blocks"
        )


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

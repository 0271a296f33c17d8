"""Writes the keys and values of a step's new tokens into the cache, in place.

One program moves one token: the keys and values of all its KV heads, which are contiguous both in
the step and in the cache. The output caches share the memory of the input caches, so the kernel
writes only the new entries. A jitted function that donates the caches makes no copy. With an 8-bit
cache, the kernel divides the entries by the scale of their head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import _triton, limits
from pallas_kernels._triton import power_of_two


@functools.partial(jax.jit, static_argnames=("interpret",))
def kv_write(
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    k: Num[Array, "tokens _ _"],
    v: Num[Array, "tokens _ _"],
    slots: Int32[Array, " tokens"],
    layer: limits.LayerIndex,
    *,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
    interpret: bool = False,
) -> tuple[limits.Cache, limits.Cache]:
    """Writes the keys and values of each token into its slot.

    Args:
      k_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], a dtype of
        `limits.CACHE_DTYPES`.
      v_cache: the same shape and dtype.
      k: [num_tokens, num_kv_heads, head_dim], bfloat16, float16 or float32.
      v: the same shape and dtype.
      slots: i32[num_tokens], ``block * block_size + offset`` for each token, all different. Tokens
        whose slot is outside [0, num_blocks * block_size) are padding and are not written.
      layer: the layer to write, in [0, num_layers); may be traced.
      k_scale: f32[num_layers, num_kv_heads], positive: the factor that the entries of an 8-bit key
        cache are multiplied by when they are read; None for 1 (not allowed with int8). Keys that
        are too large for an entry are clipped to the largest entry.
      v_scale: the same for the values.
      interpret: run as plain jax operations, which is slow but works on any device.

    Returns:
      The two caches with the tokens written.

    Raises:
      ValueError: a shape or dtype is not supported.
    """
    limits.check_cache(k_cache, v_cache, k_scale, v_scale)
    _, num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    limits.check_supported(
        head_dim=head_dim,
        block_size=block_size,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        dtype=k.dtype,
        cache_dtype=k_cache.dtype,
    )
    num_tokens = slots.shape[0]
    limits.check_shape("k", k, (num_tokens, num_kv_heads, head_dim))
    limits.check_shape("v", v, k.shape)
    elements = power_of_two(num_kv_heads * head_dim)
    written = _triton.call(
        functools.partial(_write_kernel, num_slots=num_blocks * block_size),
        k,
        v,
        slots,
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        name="kv_write",
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in (k_cache, v_cache)],
        num_warps=min(8, max(1, elements // 512)),
        num_stages=1,
        aliases={4: 0, 5: 1},
        interpret=interpret,
    )
    return written[0], written[1]


def _write_kernel(
    k_ref: Any,
    v_ref: Any,
    slots_ref: Any,
    layer_ref: Any,
    k_cache_ref: Any,
    v_cache_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    k_out_ref: Any,
    v_out_ref: Any,
    *,
    num_slots: int,
) -> None:
    """One program: one token."""
    del k_cache_ref, v_cache_ref  # they share the memory of the outputs
    token = _triton.program_id(0)
    layer, slot = layer_ref[0], slots_ref[token]
    _, _, block_size, num_kv_heads, head_dim = k_out_ref.shape
    element = jnp.arange(power_of_two(num_kv_heads * head_dim), dtype=jnp.int32)
    head = lax.div(element, jnp.int32(head_dim))
    dim = lax.rem(element, jnp.int32(head_dim))
    is_element = element < num_kv_heads * head_dim
    mask = is_element & (slot >= 0) & (slot < num_slots)
    block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
    for ref, scale_ref, out_ref in (
        (k_ref, k_scale_ref, k_out_ref),
        (v_ref, v_scale_ref, v_out_ref),
    ):
        x = _triton.load(ref.at[token, head, dim], mask)
        if limits.is_quantized(out_ref.dtype):
            scale = 1.0
            if scale_ref is not None:
                scale = _triton.load(scale_ref.at[layer, head], is_element, other=1)
            x = quantized(x, scale, out_ref.dtype)
        where = out_ref.at[layer, block, offset, head, dim]
        _triton.store(where, x.astype(out_ref.dtype), mask=mask)


def quantized(
    x: Float[Array, "*shape"], scale: Float32[Array, "*scales"] | float, dtype: DTypeLike
) -> Num[Array, "*shape"]:
    """Returns ``x / scale``, clipped to the range of the 8-bit ``dtype`` and rounded to it."""
    limit = limits.QUANTIZED_MAX[jnp.dtype(dtype).name]
    x = jnp.clip(x.astype(jnp.float32) / scale, -limit, limit)
    if jnp.dtype(dtype) == jnp.int8:
        x = jnp.floor(x + 0.5)  # a conversion to an integer truncates
    return x.astype(dtype)

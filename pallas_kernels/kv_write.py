"""Writes the keys and values of a step's new tokens into the cache, in place.

One program moves one token: the keys and values of all its KV heads, which are contiguous both in
the step and in the cache. The output caches share the memory of the input caches, so the kernel
writes only the new entries. A jitted function that donates the caches makes no copy. For a cache of
int8, the kernel also computes and writes the scale of each vector.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Num

from pallas_kernels import _triton, limits
from pallas_kernels._triton import power_of_two
from pallas_kernels.quantization import quantize


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
) -> tuple[limits.Cache, limits.Cache, limits.Scales | None, limits.Scales | None]:
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
      k_scale: `limits.Scales` of a key cache of int8; None for every other dtype.
      v_scale: the same for the values.
      interpret: run as plain jax operations, which is slow but works on any device.

    Returns:
      The two caches and their scales with the tokens written (`quantization.quantize`).

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
    heads, dims = power_of_two(num_kv_heads), power_of_two(head_dim)
    outputs = [k_cache, v_cache]
    if k_scale is not None and v_scale is not None:
        outputs += [k_scale, v_scale]
    written = _triton.call(
        functools.partial(_write_kernel, num_slots=num_blocks * block_size),
        k,
        v,
        slots,
        _triton.as_operand(layer),
        *outputs,
        name="kv_write",
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        num_warps=min(8, max(1, heads * dims // 512)),
        num_stages=1,
        aliases={4 + i: i for i in range(len(outputs))},
        interpret=interpret,
    )
    return (*written, None, None) if k_scale is None else tuple(written)


def _write_kernel(
    k_ref: Any,
    v_ref: Any,
    slots_ref: Any,
    layer_ref: Any,
    *cache_refs: Any,
    num_slots: int,
) -> None:
    """One program: one token. ``cache_refs`` are the cache arrays as operands, then as outputs."""
    # The outputs share the memory of the operands. The last two are scales, or missing.
    outputs: tuple[Any, ...] = (*cache_refs[len(cache_refs) // 2 :], None, None)
    k_out, v_out, k_scale, v_scale = outputs[:4]
    token = _triton.program_id(0)
    layer, slot = layer_ref[0], slots_ref[token]
    _, _, block_size, num_kv_heads, head_dim = k_out.shape
    head = jnp.arange(power_of_two(num_kv_heads), dtype=jnp.int32)
    dim = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)[None, :]
    is_written = (head < num_kv_heads) & (slot >= 0) & (slot < num_slots)
    mask = is_written[:, None] & (dim < head_dim)
    block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
    for ref, out_ref, scale_ref in ((k_ref, k_out, k_scale), (v_ref, v_out, v_scale)):
        x = _triton.load(ref.at[token, head[:, None], dim], mask)
        entries, scale = quantize(x, out_ref.dtype)
        _triton.store(out_ref.at[layer, block, offset, head[:, None], dim], entries, mask=mask)
        if scale is not None:
            _triton.store(scale_ref.at[layer, block, offset, head], scale, mask=is_written)

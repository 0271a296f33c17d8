"""References for the kernels in plain jnp: the same functions, written to be read.

Each reference has the signature of its kernel, without the arguments that control how a kernel
runs. Memory and speed do not matter. Tests compare references and kernels with numpy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import limits
from pallas_kernels.quantization import dequantize, quantize


def paged_decode(
    q: Float[Array, "tokens heads head_dim"],
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    block_tables: Int32[Array, "rows width"],
    seq_lens: Int32[Array, " rows"],
    layer: limits.LayerIndex,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """See `paged_decode.paged_decode`. Decode is ragged attention with one token per request."""
    query_start = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    return ragged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start,
        layer,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def ragged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    block_tables: Int32[Array, "rows width"],
    seq_lens: Int32[Array, " rows"],
    query_start: Int32[Array, " rows+1"],
    layer: limits.LayerIndex,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """See `ragged_attention.ragged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_rows, width = block_tables.shape

    # The request of each token, and the token's position in it.
    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(query_start, token, side="right") - 1
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = seq_lens[row] - query_start[row + 1] + token
    length = jnp.where(real, seq_lens[row], 0)

    # [num_tokens, context, num_kv_heads, head_dim], for every position that a table can hold.
    context = jnp.arange(width * block_size)
    block = jnp.clip(block_tables, 0, num_blocks - 1)[row][:, context // block_size]
    k = dequantize(k_cache, k_scale)[layer, block, context % block_size]
    v = dequantize(v_cache, v_scale)[layer, block, context % block_size]
    visible = (context <= position[:, None]) & (context < length[:, None])
    if window is not None:
        visible &= context > position[:, None] - window

    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    s = jnp.einsum("tkgd,tckd->tkgc", queries, k, precision="highest") * scale
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible[:, None, None, :], s, -jnp.inf)
    p = jnp.where(visible.any(1)[:, None, None, None], jax.nn.softmax(s, axis=-1), 0.0)
    v = jnp.where(visible[:, :, None, None], v, 0.0)
    out = jnp.einsum("tkgc,tckd->tkgd", p, v, precision="highest")
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def kv_write(
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    layer: limits.LayerIndex,
    *,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
) -> tuple[limits.Cache, limits.Cache, limits.Scales | None, limits.Scales | None]:
    """See `kv_write.kv_write`."""
    _, num_blocks, block_size, _, _ = k_cache.shape
    # A negative index would wrap around; an index past the end is dropped.
    block = jnp.where(slots < 0, num_blocks, slots // block_size)

    def put(into: jax.Array, x: Any) -> jax.Array:
        return into.at[layer, block, slots % block_size].set(x, mode="drop")

    k_entries, k_scales = quantize(k, k_cache.dtype)
    v_entries, v_scales = quantize(v, v_cache.dtype)
    if k_scale is not None and v_scale is not None:
        k_scale, v_scale = put(k_scale, k_scales), put(v_scale, v_scales)
    return put(k_cache, k_entries), put(v_cache, v_entries), k_scale, v_scale

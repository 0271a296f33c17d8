"""Writes to the KV cache in plain jnp, on every device: `write` of the backend `xla`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.ops.attention import AttentionMeta, KVCache, LayerIndex
from pallas_kernels.quantization import quantize


def write(
    kv: KVCache,
    layer: LayerIndex,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    meta: AttentionMeta,
) -> KVCache:
    """Writes keys and values into their slots; see `WriteFn`."""
    block_size = kv.k.shape[2]
    where = (layer, meta.slots // block_size, meta.slots % block_size)

    def put(cache: jax.Array, x: Any) -> jax.Array:
        return cache.at[where].set(x, mode="drop")

    k_entries, k_scale = quantize(k, kv.k.dtype)
    v_entries, v_scale = quantize(v, kv.v.dtype)
    written = KVCache(put(kv.k, k_entries), put(kv.v, v_entries))
    if kv.k_scale is None or kv.v_scale is None:
        return written
    return replace(written, k_scale=put(kv.k_scale, k_scale), v_scale=put(kv.v_scale, v_scale))

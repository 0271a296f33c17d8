"""Paged attention in plain jnp: runs on every device, is fast on a CPU, and checks the kernels.

Decode and prefill both read the KV cache in chunks of a few blocks, with an online softmax. Nothing
past the longest request is read. All arithmetic is float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.device import Device
from jaxserve.ops.attention import (
    AttentionBackend,
    AttentionMeta,
    KVCache,
    LayerIndex,
    Window,
    serves_everything,
)
from jaxserve.ops.xla_chunks import CacheLayer, Options
from jaxserve.ops.xla_decode import decode
from jaxserve.ops.xla_prefill import prefill
from jaxserve.ops.xla_write import write


def backend(device: Device) -> AttentionBackend:
    """Returns the backend, which is the same on every device."""
    del device
    return AttentionBackend(
        "xla", write=write, attend=attend, check=serves_everything, array_windows=True
    )


def attend(
    q: Float[Array, "tokens heads head_dim"],
    kv: KVCache,
    layer: LayerIndex,
    meta: AttentionMeta,
    *,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Computes attention over the cache; see `AttendFn`."""
    cache, options = CacheLayer(kv, layer), Options(scale, window, soft_cap)
    queries = q.astype(jnp.float32)
    if meta.decode_only:
        out = decode(queries, meta.block_tables, meta.seq_lens, cache, options)
        return out.astype(q.dtype)
    # Rows with one token take the decode path, all others the prefill path.
    num_tokens, num_rows = q.shape[0], meta.seq_lens.shape[0]
    counts = jnp.diff(meta.query_start)
    first = jnp.minimum(meta.query_start[:-1], num_tokens - 1)
    decode_lens = jnp.where(counts == 1, meta.seq_lens, 0)
    decoded = decode(queries[first], meta.block_tables, decode_lens, cache, options)
    others = prefill(queries, meta, cache, options)
    rows = jnp.searchsorted(meta.query_start[1:], jnp.arange(num_tokens), side="right")
    rows = jnp.minimum(rows, num_rows - 1)
    is_decode = (decode_lens > 0)[rows][:, None, None]
    return jnp.where(is_decode, decoded[rows], others).astype(q.dtype)

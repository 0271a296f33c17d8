"""Paged attention in plain jnp: right on every device, and the reference for kernels.

Queries are cut into tiles, each of one request; a tile walks over its request's blocks with an
online softmax, a few blocks at a time, and no further than its own last position.

Dimensions: T tokens, R requests, W block table width, N blocks, S block size, K kv heads, G query
heads per kv head, D head dim, Q queries in a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import Device
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache

_TILE = 16
_CHUNK_TOKENS = 128


def backend(device: Device) -> AttentionBackend:
    """The same on every device."""
    del device
    return AttentionBackend("xla", write=write, attend=attend)


def write(
    kv: KVCache, layer: jax.Array | int, k: jax.Array, v: jax.Array, meta: AttentionMeta
) -> KVCache:
    """See `WriteFn`."""
    block_size = kv.k.shape[2]
    at = (layer, meta.slots // block_size, meta.slots % block_size)
    return KVCache(
        k=kv.k.at[at].set(k.astype(kv.k.dtype), mode="drop"),
        v=kv.v.at[at].set(v.astype(kv.v.dtype), mode="drop"),
    )


def attend(
    q: jax.Array,
    kv: KVCache,
    layer: jax.Array | int,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `AttendFn`."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, width = meta.block_tables.shape
    block_size, num_kv_heads = kv.k.shape[2:4]
    tile = 1 if meta.decode_only else _TILE
    num_tiles = num_rows if meta.decode_only else -(-num_tokens // tile) + num_rows

    lengths = jnp.diff(meta.query_start)
    ends = jnp.cumsum(-(-lengths // tile))  # tiles of rows 0..r
    tile_ids = jnp.arange(num_tiles)
    rows = jnp.minimum(jnp.searchsorted(ends, tile_ids, side="right"), num_rows - 1)
    first_tile = ends - (-(-lengths // tile))
    starts = (tile_ids - first_tile[rows]) * tile  # in the row's queries
    offsets = starts[:, None] + jnp.arange(tile)
    tokens = jnp.minimum(meta.query_start[rows][:, None] + offsets, num_tokens - 1)
    is_real = (offsets < lengths[rows][:, None]) & (meta.seq_lens[rows] > 0)[:, None]
    positions = jnp.where(is_real, meta.positions[tokens], -1)

    pad = -width % max(1, _CHUNK_TOKENS // block_size)
    tables = jnp.pad(meta.block_tables, ((0, 0), (0, pad)))
    queries = q[tokens].reshape(num_tiles, tile, num_kv_heads, -1, head_dim)

    def one(args):
        queries, positions, table = args
        return _attend_tile(queries, positions, table, kv, layer, scale, window, soft_cap)

    out = lax.map(one, (queries, positions, tables[rows]))
    out = out.reshape(num_tiles, tile, num_heads, head_dim)
    token_ids = jnp.arange(num_tokens)
    row = jnp.minimum(jnp.searchsorted(meta.query_start[1:], token_ids, side="right"), num_rows - 1)
    at = token_ids - meta.query_start[row]
    tile_of = jnp.clip(first_tile[row] + at // tile, 0, num_tiles - 1)
    return out[tile_of, at % tile].astype(q.dtype)


def _attend_tile(q, positions, table, kv, layer, scale, window, soft_cap):
    """q [Q, K, G, D], positions i32[Q] (-1: none), table i32[W] -> f32[Q, K, G, D]."""
    tile, num_kv_heads, group, head_dim = q.shape
    num_blocks, block_size = kv.k.shape[1:3]
    step = min(max(1, _CHUNK_TOKENS // block_size), table.shape[0])
    last = jnp.max(positions)
    dtype = jnp.promote_types(q.dtype, kv.k.dtype)

    def body(i, carry):
        highest, total, acc = carry
        ids = jnp.clip(lax.dynamic_slice(table, (i * step,), (step,)), 0, num_blocks - 1)
        k = kv.k[layer, ids].reshape(-1, num_kv_heads, head_dim).astype(dtype)
        v = kv.v[layer, ids].reshape(-1, num_kv_heads, head_dim).astype(dtype)
        at = i * step * block_size + jnp.arange(step * block_size)
        v = jnp.where((at <= last)[:, None, None], v, 0)
        scores = jnp.einsum(
            "qkgd,skd->qkgs", q.astype(dtype), k, preferred_element_type=jnp.float32
        )
        scores = scores * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = at <= positions[:, None]
        if window is not None:
            seen &= at > positions[:, None] - window
        scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
        new = jnp.maximum(highest, jnp.max(scores, axis=-1))
        safe = jnp.where(new == -jnp.inf, 0, new)
        weights = jnp.exp(scores - safe[..., None])
        shrink = jnp.exp(highest - safe)
        total = total * shrink + jnp.sum(weights, axis=-1)
        acc = acc * shrink[..., None] + jnp.einsum(
            "qkgs,skd->qkgd", weights.astype(dtype), v, preferred_element_type=jnp.float32
        )
        return new, total, acc

    shape = (tile, num_kv_heads, group)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    chunk = step * block_size
    first = 0
    if window is not None:
        first = jnp.maximum(jnp.min(jnp.where(positions < 0, last, positions)) - window + 1, 0)
        first = first // chunk
    _, total, acc = lax.fori_loop(first, (last + chunk) // chunk, body, start)
    return acc / jnp.maximum(total, 1e-30)[..., None]

"""Prefill of the backend `xla`: rows with several queries.

Dimensions as in `ops.xla_chunks`, and Q queries of a tile.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.ops.attention import AttentionMeta
from jaxserve.ops.xla_chunks import CHUNK, MASKED, CacheLayer, Options, Softmax, cap

_TILE = 32  # queries

_Index = Int32[Array, ""] | int
_Queries = Float32[Array, "queries heads head_dim"]


def prefill(q: _Queries, meta: AttentionMeta, cache: CacheLayer, options: Options) -> _Queries:
    """Serves rows with more than one query. Each tile holds queries of one row.

    The result is f32[T, N, H], zero for padding and for tokens of other rows.
    """
    num_tokens = q.shape[0]
    counts = jnp.diff(meta.query_start)
    num_tiles = jnp.where(counts > 1, -(-counts // _TILE), 0)
    ends = jnp.cumsum(num_tiles)
    q = jnp.pad(q * options.scale, ((0, _TILE), (0, 0), (0, 0)))

    def serve(index: _Index, out: _Queries) -> _Queries:
        row = jnp.searchsorted(ends, index, side="right")
        in_row = (index - ends[row] + num_tiles[row]) * _TILE
        start = meta.query_start[row] + in_row
        num_queries = jnp.minimum(counts[row] - in_row, _TILE)
        position = meta.seq_lens[row] - counts[row] + in_row
        queries = lax.dynamic_slice_in_dim(q, start, _TILE)
        table = meta.block_tables[row]
        tile = _serve_tile(queries, position, num_queries, table, cache, options)
        # The tile may extend into the next row's tokens.
        is_own = (jnp.arange(_TILE) < num_queries)[:, None, None]
        others = lax.dynamic_slice_in_dim(out, start, _TILE)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, tile, others), start, 0)

    return lax.fori_loop(0, ends[-1], serve, jnp.zeros_like(q))[:num_tokens]


def _serve_tile(
    q: _Queries,
    position: Int32[Array, ""],
    num_queries: Int32[Array, ""],
    table: Int32[Array, " width"],
    cache: CacheLayer,
    options: Options,
) -> _Queries:
    """Attends with Q queries from ``position`` on; only the first ``num_queries`` are real."""
    (size, num_heads, head_dim), num_kv_heads = q.shape, cache.kv.k.shape[3]
    block_size = cache.block_size
    chunk_blocks = max(1, min(CHUNK // block_size, table.shape[0]))
    chunk = chunk_blocks * block_size
    end = position + num_queries
    begin = 0 if options.window is None else jnp.maximum(position - options.window + 1, 0)
    table = jnp.where(jnp.arange(table.shape[0]) * block_size < end, table, 0)
    table = jnp.pad(table, (0, -table.shape[0] % chunk_blocks))
    query_positions = position + jnp.arange(size)[:, None]
    by_head = q.reshape(size, num_kv_heads, -1, head_dim).transpose(1, 0, 2, 3)

    def add_chunk(index: _Index, state: Softmax) -> Softmax:
        k, v = cache.read(lax.dynamic_slice(table, (index * chunk_blocks,), (chunk_blocks,)))
        positions = index * chunk + jnp.arange(chunk)
        v = jnp.where(((positions >= begin) & (positions < end))[:, None, None], v, 0)
        visible = positions <= query_positions
        if options.window is not None:
            visible &= positions > query_positions - options.window
        scores = cap(jnp.einsum("kqgh,ckh->kqgc", by_head, k), options)
        scores = jnp.where(visible[:, None], scores, MASKED)
        return state.add(scores, lambda weights: jnp.einsum("kqgc,ckh->kqgh", weights, v))

    empty = Softmax.empty(by_head.shape[:-1], head_dim)
    state = lax.fori_loop(begin // chunk, (end + chunk - 1) // chunk, add_chunk, empty)
    return state.result().transpose(1, 0, 2, 3).reshape(size, num_heads, head_dim)

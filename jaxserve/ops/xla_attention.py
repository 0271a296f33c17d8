"""Paged attention in plain jnp: runs on every device, is fast on a CPU, and checks the kernels.

Decode and prefill both read the KV cache in chunks of a few blocks, with an online softmax. A chunk
stays in the processor's cache while it is used, and nothing past the longest request is read. All
arithmetic is float32. Dimensions as in `ops.attention`, and: C tokens of a chunk, G query heads for
each key-value head (N = K * G), M rows of a decode tile, Q queries of a prefill tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.device import Device
from jaxserve.ops.attention import (
    AttentionBackend,
    AttentionMeta,
    KVCache,
    LayerIndex,
    Window,
    serves_everything,
)
from jaxserve.ops.xla_write import write
from pallas_kernels.quantization import dequantize

# The score of a position that a query does not see. -inf would give NaN to a query that has no
# visible position yet. This score gives it equal weights, which the first real score makes zero.
_MASKED = -1e30
# Floats of keys that a decode tile reads at a time. Measurements show little effect near this size.
_DECODE_CHUNK_FLOATS = 2**19
_MAX_DECODE_TILE = 16
_CHUNK = 128  # tokens of a request that are read at a time
_PREFILL_TILE = 32

_Index = Int32[Array, ""] | int
_Queries = Float32[Array, "queries heads head_dim"]
_Chunk = Float32[Array, "*batch chunk kv_heads head_dim"]
_WeightedSum = Callable[[jax.Array], jax.Array]


class _Options(NamedTuple):
    """The options of `AttendFn`."""

    scale: float
    window: Window
    soft_cap: float | None


class _Layer(NamedTuple):
    """One layer of the cache."""

    kv: KVCache
    index: LayerIndex

    @property
    def block_size(self) -> int:
        return self.kv.k.shape[2]

    def read(self, block_ids: Int32[Array, "*batch blocks"]) -> tuple[_Chunk, _Chunk]:
        """Returns keys and values f32[..., C, K, H] of blocks i32[..., C / S], all in range."""

        def gather(cache: jax.Array) -> jax.Array:
            blocks = cache.at[self.index, block_ids].get(mode="promise_in_bounds")
            return blocks.reshape(*block_ids.shape[:-1], -1, *cache.shape[3:])

        def vectors(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
            return dequantize(gather(cache), None if scale is None else gather(scale))

        kv = self.kv
        return vectors(kv.k, kv.k_scale), vectors(kv.v, kv.v_scale)


class _Softmax(NamedTuple):
    """A softmax over the positions seen so far.

    Attributes:
      highest: f32[...], the highest score.
      total: f32[...], the sum of the weights ``exp(score - highest)``.
      values: f32[..., H], the weighted sum of the values.
    """

    highest: jax.Array
    total: jax.Array
    values: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> _Softmax:
        return _Softmax(jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))

    def add(self, scores: Float32[Array, "*batch chunk"], weighted_sum: _WeightedSum) -> _Softmax:
        """Adds positions with scores f32[..., C], and the ``weighted_sum`` of their values."""
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(self.highest - highest)
        return _Softmax(
            highest,
            self.total * shrink + jnp.sum(weights, axis=-1),
            self.values * shrink[..., None] + weighted_sum(weights),
        )

    def result(self) -> Float32[Array, "*batch head_dim"]:
        """Returns the output f32[..., H]; zero where no position has been added."""
        return self.values / jnp.maximum(self.total, 1e-30)[..., None]


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
    cache, options = _Layer(kv, layer), _Options(scale, window, soft_cap)
    queries = q.astype(jnp.float32)
    if meta.decode_only:
        out = _decode(queries, meta.block_tables, meta.seq_lens, cache, options)
        return out.astype(q.dtype)
    # Rows with one token take the decode path, all others the prefill path.
    num_tokens, num_rows = q.shape[0], meta.seq_lens.shape[0]
    counts = jnp.diff(meta.query_start)
    first = jnp.minimum(meta.query_start[:-1], num_tokens - 1)
    decode_lens = jnp.where(counts == 1, meta.seq_lens, 0)
    decoded = _decode(queries[first], meta.block_tables, decode_lens, cache, options)
    others = _prefill(queries, meta, cache, options)
    rows = jnp.searchsorted(meta.query_start[1:], jnp.arange(num_tokens), side="right")
    rows = jnp.minimum(rows, num_rows - 1)
    is_decode = (decode_lens > 0)[rows][:, None, None]
    return jnp.where(is_decode, decoded[rows], others).astype(q.dtype)


def _decode(
    q: Float32[Array, "rows heads head_dim"],
    tables: Int32[Array, "rows width"],
    seq_lens: Int32[Array, " rows"],
    cache: _Layer,
    options: _Options,
) -> Float32[Array, "rows heads head_dim"]:
    """Attends with one query per row, at its last position; rows of length 0 get finite values.

    The rows are sorted by length and served in tiles, each of which ends with its longest row.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.kv.k.shape[3], cache.block_size
    tile, chunk_blocks = _decode_tile(num_rows, tables.shape[1], cache)
    chunk = chunk_blocks * block_size
    used = jnp.arange(tables.shape[1]) * block_size < seq_lens[:, None]
    tables = jnp.where(used, tables, 0)  # unused entries may be out of range

    order = jnp.argsort(-seq_lens)
    padding = (0, -num_rows % tile)
    tables = jnp.pad(tables[order], (padding, (0, -tables.shape[1] % chunk_blocks)))
    seq_lens = jnp.pad(seq_lens[order], padding)
    q = jnp.pad(q[order], (padding, (0, 0), (0, 0))) * options.scale

    def serve(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, tables, lens = inputs
        query = _Query.of(q.reshape(tile, num_kv_heads, -1, head_dim))

        def add_chunk(index: _Index, state: _Softmax) -> _Softmax:
            block_ids = lax.dynamic_slice(tables, (0, index * chunk_blocks), (tile, chunk_blocks))
            k, v = cache.read(block_ids)
            positions = index * chunk + jnp.arange(chunk)
            visible = positions < lens[:, None]
            if options.window is not None:
                visible &= positions >= lens[:, None] - options.window
            # Invisible values may be NaN, which a weight of zero would not remove.
            v = jnp.where(visible[:, :, None, None], v, 0)
            scores = jnp.where(visible[:, None], _cap(query.scores(k), options), _MASKED)
            return state.add(scores, lambda weights: query.weighted_sum(weights, v))

        begin = 0
        if options.window is not None:
            begins = jnp.where(lens > 0, lens - options.window, jnp.max(lens))
            begin = jnp.maximum(jnp.min(begins), 0) // chunk
        end = (jnp.max(lens) + chunk - 1) // chunk
        empty = _Softmax.empty((tile, num_heads), head_dim)
        return lax.fori_loop(begin, end, add_chunk, empty).result()

    tiles = (q, tables, seq_lens)
    out = lax.map(serve, jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), tiles))
    return out.reshape(-1, num_heads, head_dim)[jnp.argsort(order)]


def _decode_tile(num_rows: int, width: int, cache: _Layer) -> tuple[int, int]:
    """Returns the rows of a tile, and the blocks of each row that are read at a time."""
    tokens = _DECODE_CHUNK_FLOATS // math.prod(cache.kv.k.shape[3:])
    tile = max(1, min(num_rows, _MAX_DECODE_TILE, tokens // _CHUNK))
    # With few rows, longer chunks fit the limit.
    chunk = _CHUNK
    while chunk < 4 * _CHUNK and 2 * chunk * tile <= tokens:
        chunk *= 2
    return tile, max(1, min(chunk // cache.block_size, width))


class _Query(NamedTuple):
    """The queries of a decode tile, in the layout that is fastest to multiply with keys.

    With few key-value heads, one matrix product covers all heads: each query is padded with zeros
    in place of the other heads. This wastes some arithmetic, but reads keys and values in their
    order in memory.

    Attributes:
      q: f32[M, K, G, H].
      spread: f32[M, N, K * H], or None if there are many heads.
    """

    q: jax.Array
    spread: jax.Array | None

    @staticmethod
    def of(q: Float32[Array, "tile kv_heads group head_dim"]) -> _Query:
        num_kv_heads, head_dim = q.shape[1], q.shape[3]
        if num_kv_heads > 4:
            return _Query(q, None)
        sides = [(k * head_dim, (num_kv_heads - 1 - k) * head_dim) for k in range(num_kv_heads)]
        heads = [jnp.pad(q[:, k], ((0, 0), (0, 0), side)) for k, side in enumerate(sides)]
        return _Query(q, jnp.concatenate(heads, axis=1))

    def scores(self, keys: _Chunk) -> Float32[Array, "tile heads chunk"]:
        tile, length = keys.shape[:2]
        if self.spread is not None:
            return jnp.einsum("mnx,mcx->mnc", self.spread, keys.reshape(tile, length, -1))
        products = jnp.sum(keys[:, :, :, None] * self.q[:, None], axis=-1)
        return products.reshape(tile, length, -1).transpose(0, 2, 1)

    def weighted_sum(
        self, weights: Float32[Array, "tile heads chunk"], values: _Chunk
    ) -> Float32[Array, "tile heads head_dim"]:
        tile, length, num_kv_heads, head_dim = values.shape
        group = self.q.shape[2]
        if self.spread is not None:
            mixed = jnp.einsum("mnc,mcx->mnx", weights, values.reshape(tile, length, -1))
            own = [
                mixed[:, k * group : (k + 1) * group, k * head_dim : (k + 1) * head_dim]
                for k in range(num_kv_heads)
            ]
            return jnp.concatenate(own, axis=1)
        weights = weights.transpose(0, 2, 1).reshape(tile, length, num_kv_heads, group)
        summed = jnp.sum(weights[..., None] * values[:, :, :, None], axis=1)
        return summed.reshape(tile, -1, head_dim)


def _prefill(q: _Queries, meta: AttentionMeta, cache: _Layer, options: _Options) -> _Queries:
    """Serves rows with more than one query. Each tile holds queries of one row.

    The result is f32[T, N, H], zero for padding and for tokens of other rows.
    """
    num_tokens = q.shape[0]
    counts = jnp.diff(meta.query_start)
    num_tiles = jnp.where(counts > 1, -(-counts // _PREFILL_TILE), 0)
    ends = jnp.cumsum(num_tiles)
    q = jnp.pad(q * options.scale, ((0, _PREFILL_TILE), (0, 0), (0, 0)))

    def serve(index: _Index, out: _Queries) -> _Queries:
        row = jnp.searchsorted(ends, index, side="right")
        in_row = (index - ends[row] + num_tiles[row]) * _PREFILL_TILE
        start = meta.query_start[row] + in_row
        num_queries = jnp.minimum(counts[row] - in_row, _PREFILL_TILE)
        position = meta.seq_lens[row] - counts[row] + in_row
        queries = lax.dynamic_slice_in_dim(q, start, _PREFILL_TILE)
        table = meta.block_tables[row]
        tile = _prefill_tile(queries, position, num_queries, table, cache, options)
        # The tile may extend into the next row's tokens.
        is_own = (jnp.arange(_PREFILL_TILE) < num_queries)[:, None, None]
        others = lax.dynamic_slice_in_dim(out, start, _PREFILL_TILE)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, tile, others), start, 0)

    return lax.fori_loop(0, ends[-1], serve, jnp.zeros_like(q))[:num_tokens]


def _prefill_tile(
    q: _Queries,
    position: Int32[Array, ""],
    num_queries: Int32[Array, ""],
    table: Int32[Array, " width"],
    cache: _Layer,
    options: _Options,
) -> _Queries:
    """Attends with Q queries from ``position`` on; only the first ``num_queries`` are real."""
    (size, num_heads, head_dim), num_kv_heads = q.shape, cache.kv.k.shape[3]
    block_size = cache.block_size
    chunk_blocks = max(1, min(_CHUNK // block_size, table.shape[0]))
    chunk = chunk_blocks * block_size
    end = position + num_queries
    begin = 0 if options.window is None else jnp.maximum(position - options.window + 1, 0)
    table = jnp.where(jnp.arange(table.shape[0]) * block_size < end, table, 0)
    table = jnp.pad(table, (0, -table.shape[0] % chunk_blocks))
    query_positions = position + jnp.arange(size)[:, None]
    by_head = q.reshape(size, num_kv_heads, -1, head_dim).transpose(1, 0, 2, 3)

    def add_chunk(index: _Index, state: _Softmax) -> _Softmax:
        k, v = cache.read(lax.dynamic_slice(table, (index * chunk_blocks,), (chunk_blocks,)))
        positions = index * chunk + jnp.arange(chunk)
        v = jnp.where(((positions >= begin) & (positions < end))[:, None, None], v, 0)
        visible = positions <= query_positions
        if options.window is not None:
            visible &= positions > query_positions - options.window
        scores = _cap(jnp.einsum("kqgh,ckh->kqgc", by_head, k), options)
        scores = jnp.where(visible[:, None], scores, _MASKED)
        return state.add(scores, lambda weights: jnp.einsum("kqgc,ckh->kqgh", weights, v))

    empty = _Softmax.empty(by_head.shape[:-1], head_dim)
    state = lax.fori_loop(begin // chunk, (end + chunk - 1) // chunk, add_chunk, empty)
    return state.result().transpose(1, 0, 2, 3).reshape(size, num_heads, head_dim)


def _cap(scores: jax.Array, options: _Options) -> jax.Array:
    if options.soft_cap is None:
        return scores
    return options.soft_cap * jnp.tanh(scores / options.soft_cap)

"""Decode of the backend `xla`: one query for each row.

Dimensions as in `ops.xla_chunks`, and: G query heads for each key-value head (N = K * G), M rows of
a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.ops.xla_chunks import CHUNK, MASKED, CacheLayer, Chunk, Options, Softmax, cap

# Floats of keys that a tile reads at a time. Measurements show little effect near this size.
_CHUNK_FLOATS = 2**19
_MAX_TILE = 16

_Index = Int32[Array, ""] | int


def decode(
    q: Float32[Array, "rows heads head_dim"],
    tables: Int32[Array, "rows width"],
    seq_lens: Int32[Array, " rows"],
    cache: CacheLayer,
    options: Options,
) -> Float32[Array, "rows heads head_dim"]:
    """Attends with one query per row, at its last position; rows of length 0 get finite values.

    The rows are sorted by length and served in tiles, each of which ends with its longest row.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.kv.k.shape[3], cache.block_size
    tile, chunk_blocks = _tile_size(num_rows, tables.shape[1], cache)
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

        def add_chunk(index: _Index, state: Softmax) -> Softmax:
            block_ids = lax.dynamic_slice(tables, (0, index * chunk_blocks), (tile, chunk_blocks))
            k, v = cache.read(block_ids)
            positions = index * chunk + jnp.arange(chunk)
            visible = positions < lens[:, None]
            if options.window is not None:
                visible &= positions >= lens[:, None] - options.window
            # Invisible values may be NaN, which a weight of zero would not remove.
            v = jnp.where(visible[:, :, None, None], v, 0)
            scores = jnp.where(visible[:, None], cap(query.scores(k), options), MASKED)
            return state.add(scores, lambda weights: query.weighted_sum(weights, v))

        begin = 0
        if options.window is not None:
            begins = jnp.where(lens > 0, lens - options.window, jnp.max(lens))
            begin = jnp.maximum(jnp.min(begins), 0) // chunk
        end = (jnp.max(lens) + chunk - 1) // chunk
        empty = Softmax.empty((tile, num_heads), head_dim)
        return lax.fori_loop(begin, end, add_chunk, empty).result()

    tiles = (q, tables, seq_lens)
    out = lax.map(serve, jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), tiles))
    return out.reshape(-1, num_heads, head_dim)[jnp.argsort(order)]


def _tile_size(num_rows: int, width: int, cache: CacheLayer) -> tuple[int, int]:
    """Returns the rows of a tile, and the blocks of each row that are read at a time."""
    tokens = _CHUNK_FLOATS // math.prod(cache.kv.k.shape[3:])
    tile = max(1, min(num_rows, _MAX_TILE, tokens // CHUNK))
    # With few rows, longer chunks fit the limit.
    chunk = CHUNK
    while chunk < 4 * CHUNK and 2 * chunk * tile <= tokens:
        chunk *= 2
    return tile, max(1, min(chunk // cache.block_size, width))


class _Query(NamedTuple):
    """The queries of a tile, in the layout that is fastest to multiply with keys.

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

    def scores(self, keys: Chunk) -> Float32[Array, "tile heads chunk"]:
        tile, length = keys.shape[:2]
        if self.spread is not None:
            return jnp.einsum("mnx,mcx->mnc", self.spread, keys.reshape(tile, length, -1))
        products = jnp.sum(keys[:, :, :, None] * self.q[:, None], axis=-1)
        return products.reshape(tile, length, -1).transpose(0, 2, 1)

    def weighted_sum(
        self, weights: Float32[Array, "tile heads chunk"], values: Chunk
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

"""The code that the attention kernels share: tiles of the cache, and an online softmax over tiles.

A tile is ``block_n`` consecutive positions of one request. Its keys and values are gathered through
the block table with one lookup per position, so a tile may span several blocks or lie within one.
Only live positions are read. Other entries of the cache and the table may hold anything, such as
NaN and block IDs out of range.

Scores are in units of log2, because the hardware has exp2 and no exp.

Dimensions: M queries of a program, ``block_n`` keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from pallas_kernels import _triton, limits

_LOG2_E = 1.4426950408889634
_MINUS_INF = float("-inf")

Scores = Float32[Array, "queries keys"]


@dataclass(frozen=True)
class AttentionSpec:
    """The sizes and options of an attention call; static.

    Attributes:
      num_kv_heads: KV heads of a layer.
      group: query heads that share a KV head; KV head ``k`` serves query heads ``k * group`` to
        ``(k + 1) * group - 1``.
      head_dim: size of a head.
      block_size: positions of a cache block.
      dot_dtype: operand dtype of both matrix products; sums are float32.
      scale: factor of the scores.
      window: a query at position p sees positions above ``p - window``; None for no limit.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; None for no cap.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dot_dtype: DTypeLike
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def padded_head_dim(self) -> int:
        """The head size, rounded up to a power of two; the padding is masked and never read."""
        return _triton.power_of_two(self.head_dim)

    @staticmethod
    def of(
        q: Num[Array, "rows heads _"],
        k_cache: limits.Cache,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> AttentionSpec:
        """Returns the attention of ``q`` over a cache.

        Raises:
          ValueError: a size, dtype or option is not supported.
        """
        _, _, block_size, num_kv_heads, head_dim = k_cache.shape
        num_heads = q.shape[-2]
        if q.shape[-1] != head_dim:
            raise ValueError(f"q must have heads of {head_dim} like the cache, got {q.shape[-1]}")
        limits.check_supported(
            head_dim=head_dim,
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dtype=q.dtype,
            cache_dtype=k_cache.dtype,
        )
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 token, got {window}")
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {soft_cap}")
        return AttentionSpec(
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dot_dtype=limits.dot_dtype(q.dtype, k_cache.dtype),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )


class KVSource(NamedTuple):
    """The location of the keys and values of one request, layer and KV head.

    Attributes:
      k_ref: reference to the keys, [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
      v_ref: the same for the values.
      k_scale_ref: reference to the scales of the keys, `limits.Scales`; None without scales.
      v_scale_ref: the same for the values.
      table_ref: reference to the block tables i32[num_rows, width].
      row: the request's row of the block tables.
      layer: index of the layer.
      head: index of the KV head.
    """

    k_ref: Any
    v_ref: Any
    k_scale_ref: Any
    v_scale_ref: Any
    table_ref: Any
    row: Int32[Array, ""]
    layer: Int32[Array, ""]
    head: Int32[Array, ""]


class Tile(NamedTuple):
    """Consecutive keys and values of a request.

    Attributes:
      k: [block_n, padded head_dim], in the operand dtype of the products.
      v: the same for the values.
      k_scale: f32[block_n], the factors of the keys; None for 1.
      v_scale: the same for the values.
    """

    k: Float[Array, "keys padded_head_dim"]
    v: Float[Array, "keys padded_head_dim"]
    k_scale: Float32[Array, " keys"] | None
    v_scale: Float32[Array, " keys"] | None


class Softmax(NamedTuple):
    """The softmax-weighted sum over the tiles seen so far, for each of M queries.

    Attributes:
      maximum: f32[M], the largest score; -inf before the first visible key.
      total: f32[M], the sum of the weights ``exp2(score - maximum)``.
      values: f32[M, padded head_dim], the weighted sum of the values.
    """

    maximum: Float32[Array, " queries"]
    total: Float32[Array, " queries"]
    values: Float32[Array, "queries padded_head_dim"]


def dims(attention: AttentionSpec) -> Int32[Array, "1 padded_head_dim"]:
    """Returns the index of each element of a padded head."""
    return jnp.arange(attention.padded_head_dim, dtype=jnp.int32)[None, :]


def rows_mask(
    live: Bool[Array, " n"], attention: AttentionSpec
) -> Bool[Array, "n padded_head_dim"]:
    """Returns a mask that is true in ``live`` rows, except for the padding of the heads."""
    mask = live[:, None]
    if attention.padded_head_dim != attention.head_dim:
        mask = mask & (dims(attention) < attention.head_dim)
    return jnp.broadcast_to(mask, (live.shape[0], attention.padded_head_dim))


def load_tile(
    source: KVSource,
    positions: Int32[Array, " keys"],
    live: Bool[Array, " keys"] | None,
    attention: AttentionSpec,
) -> Tile:
    """Returns the keys and values at ``positions``.

    Args:
      source: the location to read from.
      positions: i32[block_n], not negative.
      live: bool[block_n], the positions that hold a token; the others read as zeros. None if all
        positions hold one.
      attention: the attention call.
    """
    block_size = jnp.int32(attention.block_size)
    index = (source.row, lax.div(positions, block_size))
    block = _triton.load(source.table_ref.at[index], live)
    offset = lax.rem(positions, block_size)
    mask = None
    if live is not None:
        mask = rows_mask(live, attention)
    elif attention.padded_head_dim != attention.head_dim:
        mask = rows_mask(jnp.ones(positions.shape, jnp.bool_), attention)
    where = (source.layer, block[:, None], offset[:, None], source.head, dims(attention))
    k = _triton.load(source.k_ref.at[where], mask).astype(attention.dot_dtype)
    v = _triton.load(source.v_ref.at[where], mask).astype(attention.dot_dtype)
    k_scale = v_scale = None
    if source.k_scale_ref is not None:
        where = (source.layer, block, offset, source.head)
        k_scale = _triton.load(source.k_scale_ref.at[where], live)
        v_scale = _triton.load(source.v_scale_ref.at[where], live)
    return Tile(k, v, k_scale, v_scale)


def empty_softmax(num_queries: int, attention: AttentionSpec) -> Softmax:
    """Returns the state before the first key."""
    return Softmax(
        maximum=jnp.full((num_queries,), _MINUS_INF, jnp.float32),
        total=jnp.zeros((num_queries,), jnp.float32),
        values=jnp.zeros((num_queries, attention.padded_head_dim), jnp.float32),
    )


def scores(
    q: Float[Array, "queries padded_head_dim"], tile: Tile, attention: AttentionSpec
) -> Scores:
    """Returns the scores f32[M, block_n], in units of log2."""
    s = _dot(q, tile.k, contract=1)
    if tile.k_scale is not None:
        s *= tile.k_scale[None, :]
    if attention.soft_cap is None:
        return s * (attention.scale * _LOG2_E)
    # tanh with one exp2. Both ends are exact: exp2 gives 0 or inf there, and never inf / inf.
    double = s * (attention.scale * 2.0 * _LOG2_E / attention.soft_cap)
    tanh = 1.0 - 2.0 / (jnp.exp2(double) + 1.0)
    return tanh * (attention.soft_cap * _LOG2_E)


def mask_scores(s: Scores, visible: Bool[Array, "#queries keys"]) -> Scores:
    """Returns the scores with -inf where not ``visible``."""
    return jnp.where(visible, s, _MINUS_INF)


def add_tile(state: Softmax, s: Scores, tile: Tile) -> Softmax:
    """Returns the state with one more tile, whose scores are ``s`` f32[M, block_n]."""
    maximum = jnp.maximum(state.maximum, jnp.max(s, axis=1))
    # Before a query's first visible key its maximum is -inf, and -inf - -inf is NaN.
    finite = jnp.where(maximum == _MINUS_INF, 0.0, maximum)
    p = jnp.exp2(s - finite[:, None])
    shrink = jnp.exp2(state.maximum - finite)
    total = state.total * shrink + jnp.sum(p, axis=1)
    values = state.values * shrink[:, None] + _weighted_sum(p, tile)
    return Softmax(maximum, total, values)


def _weighted_sum(p: Scores, tile: Tile) -> Float32[Array, "queries padded_head_dim"]:
    """Returns the sums of the values of a tile with the weights ``p`` f32[M, block_n]."""
    if tile.v_scale is None:
        return _dot(p.astype(tile.v.dtype), tile.v, contract=0)
    if tile.v.dtype != jnp.float16:
        return _dot((p * tile.v_scale[None, :]).astype(tile.v.dtype), tile.v, contract=0)
    # A small weight times a small scale is zero in float16. So the scales are made relative to the
    # largest one, which multiplies the sums in float32.
    largest = jnp.max(tile.v_scale, axis=0)
    relative = tile.v_scale / jnp.where(largest == 0.0, 1.0, largest)
    return _dot((p * relative[None, :]).astype(tile.v.dtype), tile.v, contract=0) * largest


def normalized(state: Softmax) -> Float32[Array, "queries padded_head_dim"]:
    """Returns the attention output; zeros for a query without a visible key."""
    total = jnp.where(state.total == 0.0, 1.0, state.total)
    return state.values * (1.0 / total)[:, None]


def _dot(a: Float[Array, "m k"], b: Float[Array, "_ _"], *, contract: int) -> Float32[Array, "m n"]:
    """Returns ``a @ b`` (contract 0) or ``a @ b.T`` (contract 1) with float32 sums."""
    # HIGHEST keeps float32 operands from being rounded to tf32. Other dtypes are not affected.
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )

"""What the attention kernels share: tiles of the cache, and softmax over tiles as they come.

A tile is ``block_n`` consecutive positions of one request. Its keys and values are gathered through
the block table, one lookup a position, so a tile may span blocks or be a part of one. Only live
positions are read: whatever else the cache or the table holds (NaN, ids out of range) stays
where it is.

Scores are kept in units of log2, because the hardware has exp2 and not exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import _triton, limits

_LOG2_E = 1.4426950408889634
_MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Attention:
    """What one attention call computes; static.

    Attributes:
      num_kv_heads: key heads of a layer.
      group: query heads that share a key head; those of key head ``k`` are ``k * group`` and on.
      head_dim: size of a head.
      block_size: positions of a cache block.
      dot_dtype: dtype of the operands of both matrix products; sums are float32.
      scale: what scores are multiplied by.
      window: a query at position p sees positions above ``p - window``; None for all.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; None to leave them.
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
        """Array sizes must be powers of two; the rest is masked and never read."""
        return _triton.power_of_two(self.head_dim)

    @staticmethod
    def of(
        q: jax.Array,
        k_cache: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Attention:
        """The attention of ``q`` over a cache; raises ValueError for what is not supported."""
        _, _, block_size, num_kv_heads, head_dim = k_cache.shape
        num_heads = q.shape[-2]
        if q.shape[-1] != head_dim:
            raise ValueError(f"q has heads of {q.shape[-1]}, the cache has heads of {head_dim}")
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
        return Attention(
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
    """Where the keys and values of one request, layer and key head are.

    Attributes:
      k_ref: reference to the keys, [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
      v_ref: the same for the values.
      table_ref: reference to the block tables i32[num_rows, width].
      row: the row of the block tables.
      layer: index of the layer.
      head: index of the key head.
    """

    k_ref: Any
    v_ref: Any
    table_ref: Any
    row: jax.Array
    layer: jax.Array
    head: jax.Array


class Softmax(NamedTuple):
    """Softmax-weighted sum over the tiles seen so far, for each of M queries.

    Attributes:
      maximum: f32[M], the largest score; -inf before the first visible key.
      total: f32[M], sum of ``exp2(score - maximum)``.
      values: f32[M, padded head_dim], the values weighted with the same.
    """

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def dims(attention: Attention) -> jax.Array:
    """i32[1, padded head_dim]: the index of each element of a head."""
    return jnp.arange(attention.padded_head_dim, dtype=jnp.int32)[None, :]


def rows_mask(live: jax.Array, attention: Attention) -> jax.Array:
    """bool[M, padded head_dim]: the rows where ``live`` bool[M], less the padding of the heads."""
    mask = live[:, None]
    if attention.padded_head_dim != attention.head_dim:
        mask = mask & (dims(attention) < attention.head_dim)
    return jnp.broadcast_to(mask, (live.shape[0], attention.padded_head_dim))


def load_tile(
    source: KVSource, positions: jax.Array, live: jax.Array | None, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [block_n, padded head_dim] at ``positions``; zeros where not ``live``.

    Args:
      source: where to read.
      positions: i32[block_n], not negative.
      live: bool[block_n], which positions hold a token; None if all do.
      attention: the call.
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
    k = _triton.load(source.k_ref.at[where], mask)
    v = _triton.load(source.v_ref.at[where], mask)
    return k.astype(attention.dot_dtype), v.astype(attention.dot_dtype)


def empty_softmax(num_queries: int, attention: Attention) -> Softmax:
    """No key seen yet."""
    return Softmax(
        maximum=jnp.full((num_queries,), _MINUS_INF, jnp.float32),
        total=jnp.zeros((num_queries,), jnp.float32),
        values=jnp.zeros((num_queries, attention.padded_head_dim), jnp.float32),
    )


def scores(
    q: jax.Array, k: jax.Array, k_scale: jax.Array | float, attention: Attention
) -> jax.Array:
    """f32[M, block_n]: scores of M queries, in units of log2."""
    s = _dot(q, k, contract=1)
    if attention.soft_cap is None:
        return s * (k_scale * (attention.scale * _LOG2_E))
    # tanh by one exp2; both ends are right: exp2 gives 0 or inf there, and never inf / inf.
    double = s * (k_scale * (attention.scale * 2.0 * _LOG2_E / attention.soft_cap))
    tanh = 1.0 - 2.0 / (jnp.exp2(double) + 1.0)
    return tanh * (attention.soft_cap * _LOG2_E)


def mask_scores(s: jax.Array, visible: jax.Array) -> jax.Array:
    """``s`` where ``visible``, else -inf."""
    return jnp.where(visible, s, _MINUS_INF)


def add_tile(state: Softmax, s: jax.Array, v: jax.Array) -> Softmax:
    """Takes one more tile into the sum: scores f32[M, block_n] and values [block_n, head_dim]."""
    maximum = jnp.maximum(state.maximum, jnp.max(s, axis=1))
    # A query that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
    finite = jnp.where(maximum == _MINUS_INF, 0.0, maximum)
    p = jnp.exp2(s - finite[:, None])
    shrink = jnp.exp2(state.maximum - finite)
    return Softmax(
        maximum=maximum,
        total=state.total * shrink + jnp.sum(p, axis=1),
        values=state.values * shrink[:, None] + _dot(p.astype(v.dtype), v, contract=0),
    )


def normalized(state: Softmax, v_scale: jax.Array | float) -> jax.Array:
    """f32[M, padded head_dim]: the attention output; zeros for a query that saw no key."""
    total = jnp.where(state.total == 0.0, 1.0, state.total)
    return state.values * (v_scale / total)[:, None]


def load_scale(ref: Any, layer: jax.Array, head: jax.Array) -> jax.Array | float:
    """What the entries of a layer and key head are multiplied by; ``ref`` is None for 1."""
    return 1.0 if ref is None else ref[layer, head]


def _dot(a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """``a @ b`` (contract 0) or ``a @ b.T`` (contract 1) with float32 sums."""
    # HIGHEST keeps float32 operands from being cut down to tf32; others are not affected.
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )

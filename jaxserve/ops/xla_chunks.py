"""Chunks of the cache and an online softmax, for decode and prefill of the backend `xla`.

A chunk is a few blocks of one request. It stays in the processor's cache while it is used.

Dimensions as in `ops.attention`, and C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.ops.attention import KVCache, LayerIndex, Window
from pallas_kernels.quantization import dequantize

MASKED = -1e30
"""The score of a position that a query does not see. -inf would give NaN to a query that has no
visible position yet. This score gives it equal weights, which the first real score makes zero.
"""

CHUNK = 128
"""Tokens of a request that are read at a time."""

Chunk = Float32[Array, "*batch chunk kv_heads head_dim"]
WeightedSum = Callable[[jax.Array], jax.Array]


class Options(NamedTuple):
    """The options of `AttendFn`."""

    scale: float
    window: Window
    soft_cap: float | None


class CacheLayer(NamedTuple):
    """One layer of the cache."""

    kv: KVCache
    index: LayerIndex

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.kv.k.shape[2]

    def read(self, block_ids: Int32[Array, "*batch blocks"]) -> tuple[Chunk, Chunk]:
        """Returns keys and values f32[..., C, K, H] of blocks i32[..., C / S], all in range."""

        def gather(cache: jax.Array) -> jax.Array:
            blocks = cache.at[self.index, block_ids].get(mode="promise_in_bounds")
            return blocks.reshape(*block_ids.shape[:-1], -1, *cache.shape[3:])

        def vectors(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
            return dequantize(gather(cache), None if scale is None else gather(scale))

        kv = self.kv
        return vectors(kv.k, kv.k_scale), vectors(kv.v, kv.v_scale)


class Softmax(NamedTuple):
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
    def empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
        """Returns the state before the first position, for queries of this shape."""
        return Softmax(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))

    def add(self, scores: Float32[Array, "*batch chunk"], weighted_sum: WeightedSum) -> Softmax:
        """Adds positions with scores f32[..., C], and the ``weighted_sum`` of their values."""
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(self.highest - highest)
        return Softmax(
            highest,
            self.total * shrink + jnp.sum(weights, axis=-1),
            self.values * shrink[..., None] + weighted_sum(weights),
        )

    def result(self) -> Float32[Array, "*batch head_dim"]:
        """Returns the output f32[..., H]; zero where no position has been added."""
        return self.values / jnp.maximum(self.total, 1e-30)[..., None]


def cap(scores: jax.Array, options: Options) -> jax.Array:
    """Returns the scores after the soft cap, if there is one."""
    if options.soft_cap is None:
        return scores
    return options.soft_cap * jnp.tanh(scores / options.soft_cap)

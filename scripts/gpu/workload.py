"""Attention over a large cache, as the layers of a step do it: one call after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.models import BLOCK_SIZE
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import KVCache

# Part of the free memory for a cache: it is made of a copy of itself.
_PART = 0.4


class Pool:
    """One layer of a cache full of random numbers.

    Args:
      spec: of the model.
      dtype: of the cache.
      num_tokens: how many are wanted; there are fewer if they do not fit the memory of the device.
    """

    def __init__(self, spec: ModelSpec, dtype: str, num_tokens: int) -> None:
        self._spec, self._dtype = spec, jnp.dtype(dtype)
        self.bytes_per_token = 2 * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 2**30) - stats.get("bytes_in_use", 0)
        fitting = int(free * _PART) // (self.bytes_per_token * BLOCK_SIZE)
        self.num_blocks = min(-(-num_tokens // BLOCK_SIZE), fitting)
        shape = (1, self.num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.kv = KVCache(*(_filled(key, shape, self._dtype) for key in (1, 2)))
        self._order = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)

    def holds(self, num_rows: int, context: int) -> bool:
        """Whether so many contexts have blocks of their own."""
        return num_rows * -(-context // BLOCK_SIZE) <= self.num_blocks

    def queries(self, num_tokens: int) -> jax.Array:
        """Random queries [num_tokens, num_heads, head_dim]."""
        shape = (num_tokens, self._spec.num_heads, self._spec.head_dim)
        return jax.random.normal(jax.random.key(3), shape, self._dtype)

    def tables(self, num_calls: int, num_rows: int, context: int, *, width: int) -> jax.Array:
        """Block tables i32[num_calls, num_rows, width], different blocks for each call.

        So no call finds in the cache of the chip what the one before has left there, as long as
        there are enough blocks.
        """
        used = -(-context // BLOCK_SIZE)
        tables = np.zeros((num_calls, num_rows, width), np.int32)
        blocks = np.resize(self._order, num_calls * num_rows * used)
        tables[:, :, :used] = blocks.reshape(num_calls, num_rows, used)
        return jnp.asarray(tables)


def chained(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``call(q, kv, table, *rest)`` for each table; the output of one is the queries of the next.

    Without that the device could run them at the same time, which the layers of a model do not.
    """

    def calls(q: jax.Array, kv: KVCache, tables: jax.Array, *rest: Any) -> jax.Array:
        for table in tables:
            q = call(q, kv, table, *rest)
        return q

    return jax.jit(calls)


def _filled(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers that repeat: as good for timing, and made without much memory."""
    few = min(shape[1], 64)
    some = jax.random.normal(jax.random.key(seed), (1, few, *shape[2:]), dtype)
    repeats = -(-shape[1] // few)
    return jnp.tile(some, (1, repeats, 1, 1, 1))[:, : shape[1]]

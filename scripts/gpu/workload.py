"""Attention over a large cache, one call after another as in the layers of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.models import BLOCK_SIZE
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import KVCache

# The fraction of the free memory for a cache. Building the cache takes a copy of it.
_CACHE_FRACTION = 0.4


class Pool:
    """One layer of a cache, filled with random numbers.

    Args:
      spec: the shape of the model.
      dtype: dtype of the cache.
      num_tokens: size of the cache in tokens; less if it does not fit the memory of the device.
    """

    def __init__(self, spec: ModelSpec, dtype: str, num_tokens: int) -> None:
        self._spec, self._dtype = spec, jnp.dtype(dtype)
        self.bytes_per_token = 2 * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 2**30) - stats.get("bytes_in_use", 0)
        fitting = int(free * _CACHE_FRACTION) // (self.bytes_per_token * BLOCK_SIZE)
        self.num_blocks = min(-(-num_tokens // BLOCK_SIZE), fitting)
        shape = (1, self.num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.kv = KVCache(*(_filled(key, shape, self._dtype) for key in (1, 2)))
        self._order = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)

    def holds(self, num_rows: int, context: int) -> bool:
        """Returns whether ``num_rows`` contexts fit without sharing blocks."""
        return num_rows * -(-context // BLOCK_SIZE) <= self.num_blocks

    def queries(self, num_tokens: int) -> jax.Array:
        """Returns random queries [num_tokens, num_heads, head_dim]."""
        shape = (num_tokens, self._spec.num_heads, self._spec.head_dim)
        return jax.random.normal(jax.random.key(3), shape, self._dtype)

    def tables(self, num_calls: int, num_rows: int, context: int, *, width: int) -> jax.Array:
        """Returns block tables i32[num_calls, num_rows, width] with different blocks for each call.

        So, if the pool has enough blocks, no call finds the keys and values of the previous call in
        the cache of the chip.
        """
        used = -(-context // BLOCK_SIZE)
        tables = np.zeros((num_calls, num_rows, width), np.int32)
        blocks = np.resize(self._order, num_calls * num_rows * used)
        tables[:, :, :used] = blocks.reshape(num_calls, num_rows, used)
        return jnp.asarray(tables)


def chained(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that runs ``call(q, kv, table, *rest)`` for each table.

    The output of a call becomes the queries of the next call. Otherwise the device could run the
    calls at the same time, unlike the layers of a model.
    """

    def calls(q: jax.Array, kv: KVCache, tables: jax.Array, *rest: Any) -> jax.Array:
        for table in tables:
            q = call(q, kv, table, *rest)
        return q

    return jax.jit(calls)


def _filled(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns repeated random numbers, which need little memory to make and do not change times."""
    few = min(shape[1], 64)
    some = jax.random.normal(jax.random.key(seed), (1, few, *shape[2:]), dtype)
    repeats = -(-shape[1] // few)
    return jnp.tile(some, (1, repeats, 1, 1, 1))[:, : shape[1]]

"""Decides the dtype of the KV cache, computes its size, and allocates it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device import Device
from jaxserve.ops.attention import KVCache


def cache_dtype(dtype: str, device: Device) -> str:
    """Returns the dtype of the cache of a model that computes in ``dtype``."""
    # On a CPU, jax before 0.11 scatters into a bfloat16 array by converting all of it to float32
    # and back.
    rewrites_bf16 = device.platform == "cpu" and jax.__version_info__ < (0, 11)
    return "float32" if dtype == "bfloat16" and rewrites_bf16 else dtype


def bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of the keys and values of one token over all layers of the cache."""
    return 2 * num_layers * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def allocate(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> KVCache:
    """Allocates a cache of zeros.

    It waits for the device, so that a lack of memory is noticed here and not in the first step.
    """
    shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    k, v = (jnp.zeros(shape, np.dtype(dtype)) for _ in range(2))
    return jax.block_until_ready(KVCache(k, v))

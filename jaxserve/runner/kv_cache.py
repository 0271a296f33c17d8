"""Decides the dtype of the KV cache, computes its size, and allocates it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device import Device
from jaxserve.errors import ConfigError
from jaxserve.ops.attention import KVCache
from jaxserve.runner.placement import ONE_DEVICE, Placement
from pallas_kernels.quantization import has_scales

_DTYPES: dict[str, str] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
"""Values of ``--kv-cache-dtype`` -> names of numpy dtypes."""

AXES = ("layers", "blocks", "block_size", "kv_heads", "head_dim")
"""The names of the axes of a cache. The scales of a cache lack the last one."""


def cache_dtype(asked: str, dtype: str, device: Device) -> tuple[str, str]:
    """Returns the dtype of the cache, a numpy name, and the reason for it.

    Args:
      asked: `CacheConfig.kv_cache_dtype`.
      dtype: the dtype that the model computes in, a numpy name.
      device: the device of the cache.

    Raises:
      ConfigError: there is no such dtype.
    """
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype must be one of auto, {', '.join(_DTYPES)}, got {asked!r}"
            )
        return _DTYPES[asked], "as asked"
    # On a CPU, jax before 0.11 scatters into a bfloat16 array by converting all of it to float32
    # and back.
    if dtype == "bfloat16" and device.platform == "cpu" and jax.__version_info__ < (0, 11):
        return "float32", "this jax is slow to write into bfloat16 on a CPU"
    return dtype, "that of the activations"


def bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of a token's keys, values and scales over all layers of the cache."""
    vector = head_dim * jnp.dtype(dtype).itemsize
    if has_scales(dtype):
        vector += np.dtype(np.float32).itemsize
    return 2 * num_layers * num_kv_heads * vector


def abstract(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    placement: Placement = ONE_DEVICE,
) -> KVCache:
    """Returns the shapes and dtypes of a cache, with scales if ``dtype`` needs them.

    Several devices share the key-value heads of every block.
    """
    slots = (num_layers, num_blocks, block_size, num_kv_heads)
    held = "uint8" if dtype == "float8_e4m3fn" else dtype  # see `KVCache`
    sharding = placement.sharding(AXES)
    entries: Any = jax.ShapeDtypeStruct((*slots, head_dim), jnp.dtype(held), sharding=sharding)
    scales: Any = None
    if has_scales(dtype):
        scales = jax.ShapeDtypeStruct(slots, jnp.float32, sharding=placement.sharding(AXES[:-1]))
    return KVCache(entries, entries, scales, scales)


def allocate(cache: KVCache) -> KVCache:
    """Allocates zeros for what `abstract` returned.

    It waits for the device, so that a lack of memory is noticed here and not in the first step.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), cache)
    return jax.block_until_ready(zeros)

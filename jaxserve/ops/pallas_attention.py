"""Paged attention with the Pallas kernels: on NVIDIA GPUs, or interpreted on a CPU for tests.

A step in which every request has one token runs the decode kernel; any other step runs the ragged
kernel.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from jaxserve.device import Device
from jaxserve.errors import ConfigError
from jaxserve.ops.attention import (
    AttentionBackend,
    AttentionMeta,
    AttentionShape,
    KVCache,
    LayerIndex,
    Window,
)
from pallas_kernels import limits, tuning
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quantization import as_bits, from_bits
from pallas_kernels.ragged_attention import ragged_attention

MIN_COMPUTE_CAPABILITY = (8, 0)
MIN_COMPUTE_CAPABILITY_FP8 = (8, 9)
"""The first capability with instructions that convert to and from 8-bit floats."""


def backend(device: Device) -> AttentionBackend:
    """Returns the kernels with the tile sizes for ``device``, interpreted if it is a CPU."""
    interpreted = device.platform == "cpu"
    return AttentionBackend(
        "pallas_triton",
        write=functools.partial(_write, interpret=interpreted),
        attend=functools.partial(_attend, device=device),
        check=functools.partial(_check, device=device),
        check_cache=_check_cache,
        remark="interpreted, which is slow: there is no GPU" if interpreted else "",
    )


def _check(shape: AttentionShape, *, device: Device) -> None:
    """Checks the device and the shape; see `CheckFn`."""
    capability = device.compute_capability
    fp8 = shape.cache_dtype.startswith("float8")
    least = MIN_COMPUTE_CAPABILITY_FP8 if fp8 else MIN_COMPUTE_CAPABILITY
    if device.platform == "gpu" and (capability is None or capability < least):
        kind = "an NVIDIA GPU" if capability is None else "compute capability {}.{} or newer"
        what = f" with a cache of {shape.cache_dtype}" if fp8 else ""
        raise ConfigError(
            f"the attention backend pallas_triton{what} needs {kind.format(*least)}, got "
            f"{device.kind}"
        )
    try:
        limits.check_supported(
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            dtype=shape.dtype,
            cache_dtype=shape.cache_dtype,
        )
    except ValueError as error:
        raise ConfigError(
            f"the attention backend pallas_triton cannot serve this: {error}"
        ) from error


def _check_cache(kv: KVCache) -> None:
    """Checks that the kernels can address the cache; see `CheckCacheFn`."""
    try:
        limits.check_addressable(kv.k.size, kv.k.dtype)
    except ValueError as error:
        block = kv.k.size // kv.k.shape[1]
        raise ConfigError(
            f"the attention backend pallas_triton cannot serve this: {error}, with --num-blocks, "
            f"to at most {2**31 // block} or at least {2**32 // block + 1}"
        ) from error


def _write(
    kv: KVCache,
    layer: LayerIndex,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    meta: AttentionMeta,
    *,
    interpret: bool,
) -> KVCache:
    """Writes keys and values into their slots; see `WriteFn`."""
    scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    caches = (from_bits(kv.k), from_bits(kv.v))
    written = kv_write(*caches, k, v, meta.slots, layer, **scales, interpret=interpret)
    return KVCache(as_bits(written[0]), as_bits(written[1]), *written[2:])


def _attend(
    q: Float[Array, "tokens heads head_dim"],
    kv: KVCache,
    layer: LayerIndex,
    meta: AttentionMeta,
    *,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
    device: Device,
) -> Float[Array, "tokens heads head_dim"]:
    """Runs the kernel that fits the step; see `AttendFn`."""
    assert window is None or isinstance(window, int), "the kernels need a fixed window"
    _, num_heads, head_dim = q.shape
    keys = from_bits(kv.k)
    _, _, block_size, num_kv_heads, _ = kv.k.shape
    config = tuning.kernel_config(
        tuning.DECODE if meta.decode_only else tuning.RAGGED,
        head_dim=head_dim,
        group=num_heads // num_kv_heads,
        dtype=limits.dot_dtype(q.dtype, keys.dtype),
        device=device.kind,
    )
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "k_scale": kv.k_scale,
        "v_scale": kv.v_scale,
        "config": config,
        "interpret": device.platform == "cpu",
    }
    cache = (keys, from_bits(kv.v), meta.block_tables, meta.seq_lens)
    if not meta.decode_only:
        return ragged_attention(q, *cache, meta.query_start, layer, **options)
    num_rows, width = meta.block_tables.shape
    num_splits = tuning.decode_splits(
        num_rows=num_rows,
        num_kv_heads=num_kv_heads,
        max_context=width * block_size,
        block_n=config.block_n,
        num_sms=device.num_cores or tuning.NUM_SMS,
    )
    return paged_decode(q, *cache, layer, num_splits=num_splits, **options)

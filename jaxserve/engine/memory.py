"""Explains a lack of memory in one sentence that names the flags to change."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from dataclasses import replace

import jax

from jaxserve.config import MIB
from jaxserve.device import Device
from jaxserve.engine.sizing import CPU_STEP_BYTES
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

SMALLER_WEIGHTS = (
    "use --quantization int8, a 16-bit --dtype, more devices (--tensor-parallel-size) or a smaller "
    "model"
)
MORE_MEMORY = "give the process more memory (its cgroup, ulimit -v) or use a smaller model"
SMALLER_CACHE = "lower --num-blocks, --kv-cache-memory-mib or --memory-fraction"
SMALLER_STEPS = (
    "lower --max-num-batched-tokens, --max-num-seqs or the KV cache (--kv-cache-memory-mib, "
    "--num-blocks, --memory-fraction)"
)


TOO_LITTLE_FOR_STEPS = 64 * MIB
"""With less than this on a CPU, not even the first program can be compiled."""

LITTLE_FOR_STEPS = CPU_STEP_BYTES * 7 // 8
"""With less than this on a CPU, the steps of a model of 135 million parameters do not fit."""


def check_room_for_steps(device: Device, cache_bytes: int) -> None:
    """Refuses or warns if weights and cache leave a CPU little memory, before the kernel kills.

    Args:
      device: its free bytes as they will be with the weights and without the cache.
      cache_bytes: of the cache on this device.

    Raises:
      ConfigError: nothing can run in what is left.
    """
    left = device.free_bytes - cache_bytes
    if device.platform != "cpu" or left >= LITTLE_FOR_STEPS:
        return
    message = (
        f"beside the weights and {cache_bytes / MIB:.0f} MiB of KV cache, only "
        f"{max(left, 0) / MIB:.0f} MiB are left to compile and run steps, which take about "
        f"{LITTLE_FOR_STEPS / MIB:.0f} MiB with a model of 135 million parameters "
        f"({device.limited_by})"
    )
    if left < TOO_LITTLE_FOR_STEPS:
        raise ConfigError(f"{message}; {MORE_MEMORY}, or {SMALLER_STEPS}")
    logger.warning("%s; if the engine is killed, %s, or %s", message, SMALLER_STEPS, MORE_MEMORY)


def after_weights(device: Device, weight_bytes: int) -> Device:
    """Returns a device as it will be when it holds its part of the weights.

    Raises:
      ConfigError: the weights do not fit.
    """
    most = device.free_bytes if device.most_bytes is None else device.most_bytes
    free = device.free_bytes - weight_bytes
    if free < 0:
        raise ConfigError(
            f"the weights take {weight_bytes / MIB:.0f} MiB of a device, but "
            f"{device.free_bytes / MIB:.0f} MiB are free ({device.limited_by}); {SMALLER_WEIGHTS}"
        )
    return replace(device, free_bytes=free, most_bytes=most - weight_bytes)


@contextlib.contextmanager
def explained(doing: str, advice: str) -> Iterator[None]:
    """Turns a lack of memory in its body into a ConfigError.

    Args:
      doing: what the body does.
      advice: what the user can change.

    Raises:
      ConfigError: the body ran out of memory, on the host or on the device.
    """
    try:
        yield
    except (MemoryError, OSError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error).splitlines() or ["no memory"])[0]
        raise ConfigError(f"out of memory while {doing} ({reason:.200}); {advice}") from error

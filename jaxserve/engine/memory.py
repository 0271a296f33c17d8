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
MORE_MEMORY = "give the process more memory (its cgroup, ulimit -v), or use a smaller model"
SMALLER_CACHE = "lower --num-blocks, --kv-cache-memory-mib or --memory-fraction"
SMALLER_STEPS = (
    "lower --max-num-batched-tokens, --max-num-seqs or the KV cache (--kv-cache-memory-mib, "
    "--num-blocks, --memory-fraction)"
)


LITTLE_FOR_STEPS = CPU_STEP_BYTES // 2
"""With less than this on a CPU, the steps of a small model may not fit."""


def warn_of_little(device: Device, cache_bytes: int) -> None:
    """Logs a warning if weights and cache leave a CPU little memory, before the kernel kills.

    Args:
      device: its free bytes before the cache is allocated.
      cache_bytes: of the cache on this device.
    """
    left = device.free_bytes - cache_bytes
    if device.platform == "cpu" and left < LITTLE_FOR_STEPS:
        logger.warning(
            "only %.0f MiB are left to compile and run steps (%s); if the engine is killed, %s, or "
            "%s",
            left / MIB,
            device.limited_by,
            SMALLER_STEPS,
            SMALLER_WEIGHTS,
        )


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

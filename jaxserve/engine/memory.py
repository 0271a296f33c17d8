"""Explains a lack of memory in one sentence that names the flags to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import jax

from jaxserve.config import MIB
from jaxserve.device import Device
from jaxserve.errors import ConfigError

SMALLER_WEIGHTS = (
    "use --quantization int8, a 16-bit --dtype, more devices (--tensor-parallel-size) or a smaller "
    "model"
)
SMALLER_CACHE = "lower --num-blocks, --kv-cache-memory-mib or --memory-fraction"
SMALLER_STEPS = (
    "lower --max-num-batched-tokens, --max-num-seqs or the KV cache (--kv-cache-memory-mib, "
    "--num-blocks, --memory-fraction)"
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
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error).splitlines() or ["no memory"])[0]
        raise ConfigError(f"out of memory while {doing} ({reason:.200}); {advice}") from error

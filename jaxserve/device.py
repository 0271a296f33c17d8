"""Facts about the device that an engine runs on. `runner.device` reads them from jax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Exists on machines with the NVIDIA driver."""


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU or a GPU, as far as sizes and kernels depend on it.

    Attributes:
      platform: "cpu" or "gpu".
      kind: the product name, shown to the user.
      free_bytes: bytes that were free for weights and KV cache when the facts were read.
      has_native_bf16: whether the hardware computes in bfloat16.
      compute_capability: (major, minor) of an NVIDIA GPU; None on any other device.
      num_cores: streaming multiprocessors of an NVIDIA GPU; None on any other device.
      most_bytes: as ``free_bytes``, without the fraction of the memory that the user set; None: the
        same.
      limited_by: what limits ``free_bytes``, for messages.
    """

    platform: Literal["cpu", "gpu"]
    kind: str
    free_bytes: int
    has_native_bf16: bool
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None
    most_bytes: int | None = None
    limited_by: str = "the memory of the device"


CPU = Device("cpu", "CPU", 0, has_native_bf16=False)
"""A CPU about which nothing is known, for backends that are the same on every device."""

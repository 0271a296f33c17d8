"""Describes the device that this process computes on."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import psutil

from jaxserve.device import Device

CPU_INFO = Path("/proc/cpuinfo")

FIRST_CAPABILITY_WITH_BF16 = (8, 0)
"""The compute capability of the first NVIDIA GPUs that compute in bfloat16: Ampere."""


def current_device(*, pool_part: float = 1.0) -> Device:
    """Returns the default device of jax.

    On a CPU, ``free_bytes`` is the available memory. On a GPU, jax reserves a pool of memory when
    it starts, and ``free_bytes`` is the fraction ``pool_part`` (0 to 1) of the pool minus the bytes
    in use.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        name, flags = _cpu()
        has_native_bf16 = bool({"avx512_bf16", "amx_bf16"} & flags)
        return Device("cpu", name, psutil.virtual_memory().available, has_native_bf16)
    stats = device.memory_stats()
    free = int(stats["bytes_limit"] * pool_part) - stats["bytes_in_use"]
    capability = _compute_capability(getattr(device, "compute_capability", ""))
    return Device(
        "gpu",
        device.device_kind,
        max(free, 0),
        has_native_bf16=capability is None or capability >= FIRST_CAPABILITY_WITH_BF16,
        compute_capability=capability,
        num_cores=getattr(device, "core_count", None),
    )


def _compute_capability(text: str) -> tuple[int, int] | None:
    """Parses the version of an NVIDIA GPU ("9.0"); returns None for other names ("gfx942")."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", text)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def _cpu() -> tuple[str, set[str]]:
    """Returns name and feature flags of the first CPU; "CPU" and no flags without `CPU_INFO`."""
    if not CPU_INFO.exists():
        return "CPU", set()
    first = CPU_INFO.read_text().split("\n\n")[0]
    facts = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return facts.get("model name", "CPU"), set(facts.get("flags", "").split())

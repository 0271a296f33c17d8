"""Finds and describes the devices that an engine computes on."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax

from jaxserve.device import Device
from jaxserve.errors import ConfigError
from jaxserve.runner.host_memory import free_memory

CPU_INFO = Path("/proc/cpuinfo")

FIRST_CAPABILITY_WITH_BF16 = (8, 0)
"""The compute capability of the first NVIDIA GPUs that compute in bfloat16: Ampere."""


def engine_devices(count: int) -> list[Any]:
    """Returns the devices of an engine, the first ``count`` that jax sees.

    If there is no GPU and jax has not been used in this process yet, the CPU is made to look like
    ``count`` devices.

    Raises:
      ConfigError: jax sees fewer devices.
    """
    if count > 1:
        # Without effect if jax has been used, or where it finds GPUs.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise ConfigError(
            f"--tensor-parallel-size {count} needs {count} devices, but jax sees {len(devices)}: "
            f"{', '.join(map(str, devices))}"
        )
    return devices[:count]


def current_device(*, count: int = 1, pool_part: float = 1.0) -> Device:
    """Returns the facts about each of the first ``count`` devices of jax, which are alike.

    ``free_bytes`` is that of the device with the least. On a CPU, it is a device's share of the
    free memory of the host; see `free_memory`. On a GPU, jax reserves a pool of memory when it
    starts, and ``free_bytes`` is the fraction ``pool_part`` (0 to 1) of the pool minus the bytes in
    use.
    """
    devices = jax.devices()[:count]
    device = devices[0]
    if device.platform == "cpu":
        name, flags = _cpu()
        has_native_bf16 = bool({"avx512_bf16", "amx_bf16"} & flags)
        free = free_memory()
        return Device(
            "cpu",
            name,
            free.num_bytes // len(devices),
            has_native_bf16,
            limited_by=free.limited_by,
        )
    stats = [each.memory_stats() for each in devices]
    free = min(int(each["bytes_limit"] * pool_part) - each["bytes_in_use"] for each in stats)
    most = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    capability = _compute_capability(getattr(device, "compute_capability", ""))
    return Device(
        "gpu",
        device.device_kind,
        max(free, 0),
        has_native_bf16=capability is None or capability >= FIRST_CAPABILITY_WITH_BF16,
        compute_capability=capability,
        num_cores=getattr(device, "core_count", None),
        most_bytes=max(most, 0),
        limited_by=f"--memory-fraction of {device.device_kind}",
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

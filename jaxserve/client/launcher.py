"""Starts an engine as a child process, with the environment that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile

from jaxserve.config import CacheConfig, CompileConfig
from jaxserve.device import NVIDIA_DRIVER
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.ipc.child_process import ChildProcess
from jaxserve.ipc.launch import Launch

ENVIRONMENT = {
    # Show only errors of XLA's C++ code: its warnings are about its own tuning.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment variables of an engine, unless the environment of the front sets them."""

CAPTURE_COLLECTIVES = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
"""The flag of XLA that adds sums over devices to the operations that CUDA graphs may contain."""


class EngineProcess(ChildProcess):
    """An engine process, from start to exit."""

    def __init__(self, launch: Launch) -> None:
        """Starts the process.

        Raises:
          ConfigError: there are fewer visible GPUs than the engines need.
          EngineDeadError: the system has no resources for a process or a thread.
        """
        self.engine = launch.engine
        environment = child_environment(launch, os.environ, has_gpus=NVIDIA_DRIVER.exists())
        name = f"engine {launch.engine}"
        try:
            super().__init__("jaxserve.engine.process", launch, name=name, environment=environment)
        except OSError as error:
            message = f"the process of {name} cannot be started: {error}"
            raise EngineDeadError(message) from error


def child_environment(
    launch: Launch, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """Returns the environment of an engine: that of its parent, and our settings.

    ``has_gpus``: whether the machine has NVIDIA GPUs.

    Raises:
      ConfigError: there are fewer visible GPUs than the engines need.
    """
    return {
        **ENVIRONMENT,
        **memory_settings(launch.config.cache, inherited),
        **inherited,
        **xla_flags(launch.config.compile, inherited),
        **_visible_devices(launch, inherited, has_gpus=has_gpus),
    }


def xla_flags(config: CompileConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable with the flags of XLA, unless it stays as it is.

    Inherited flags come last: XLA takes the last of equal flags.
    """
    if not config.capture_collectives:
        return {}
    return {"XLA_FLAGS": f"{CAPTURE_COLLECTIVES} {inherited.get('XLA_FLAGS', '')}".strip()}


def memory_settings(cache: CacheConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that set the fraction of GPU memory that jax preallocates.

    Returns none if the environment ``inherited`` sets the fraction: jax refuses to have both names
    set. The default of jax is three quarters.
    """
    names = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if names & inherited.keys():
        return {}
    return {"XLA_CLIENT_MEM_FRACTION": f"{cache.pool_fraction:.3f}"}


def _visible_devices(
    launch: Launch, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """Returns variables that show an engine its own GPUs, if the engines use several.

    Without them every engine would use the first GPUs, and reserve memory on all. Where jax uses
    the CPU, the devices are simulated, and there may be fewer GPUs.
    """
    parallel = launch.config.parallel
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if parallel.num_devices == 1:
        return {}
    if visible is None:
        devices = list(map(str, range(parallel.num_devices)))
    else:  # CUDA ignores what follows an invalid entry, so "" and "-1" hide all GPUs.
        entries = (entry.strip() for entry in visible.split(","))
        devices = list(takewhile(lambda entry: entry not in ("", "-1"), entries))
    if len(devices) < parallel.num_devices:
        on_cpu = inherited.get("JAX_PLATFORMS", "").split(",")[0].strip() == "cpu"
        if not devices or on_cpu or not has_gpus:
            return {}
        raise ConfigError(
            f"--data-parallel-size {parallel.data_parallel_size} and --tensor-parallel-size "
            f"{parallel.tensor_parallel_size} need {parallel.num_devices} GPUs, but "
            f"CUDA_VISIBLE_DEVICES has {len(devices)}: {visible}"
        )
    first = launch.engine * parallel.tensor_parallel_size
    own = devices[first : first + parallel.tensor_parallel_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

"""Compiles a program for an H200 without a GPU, with the same compiler as on a machine with a GPU.

This needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt for the installed version of jax, but
neither a CUDA driver nor the toolkit. Matrix products outside the kernels are not autotuned, so the
program is for inspection and not for running.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

DEVICE = "NVIDIA H200"

# The description of the device for the compiler. Without versions the compiler assumes a very old
# driver and makes no CUDA graphs.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def is_available() -> bool:
    """Returns whether the wheels that contain the compiler are installed."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def h200s(count: int) -> list[Any]:
    """Returns the devices of a machine with so many H200s, for the shardings of arguments."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET, topology=f"1x1x{count}"
    )
    return list(topology.devices)


def compile_for_h200(
    jitted: jax.stages.Wrapped, *args: Any, compiler_options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a jitted function for one H200, or for those on which its arguments are.

    Args:
      jitted: a function that `jax.jit` returned.
      args: pytrees whose leaves have a shape and a dtype, for example `jax.ShapeDtypeStruct`. Those
        without a sharding are on every device as a whole.
      compiler_options: debug options of XLA by name.

    Returns:
      The program. `as_text` and `memory_analysis` work; a call does not.
    """
    given = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    mesh = next((s.mesh for s in given if s is not None), Mesh(np.array(h200s(1)), ("device",)))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed = jax.tree.map(place, args)
    with _abstract_h200():
        return jitted.lower(*placed).compile(dict(compiler_options or {}))


@contextlib.contextmanager
def _abstract_h200() -> Iterator[None]:
    """Tells jax, while it lowers kernels, that the device is an H200. Needed since jax 0.11."""
    if jax.__version_info__ < (0, 11):  # jax assumes compute capability 9.0, that of an H200
        yield
        return
    device = AbstractDevice(device_kind=DEVICE, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield

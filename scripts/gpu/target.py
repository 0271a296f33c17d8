"""Saves the compiler's description of this card, for compilation on machines without one."""

from __future__ import annotations

import jax
from jax._src.lib import xla_client

from gpu.options import Options
from gpu.report import Report, Skipped


def run(options: Options, report: Report) -> None:
    """Writes the description to a file, in the format of `pallas_kernels.testing.deviceless`."""
    if jax.default_backend() == "cpu":
        raise Skipped("there is no GPU")
    topology = xla_client.get_topology_for_devices(jax.devices())
    path = options.folder / "target_config.txt"
    path.write_text(str(topology.target_config), encoding="utf-8")
    report.add("target config", file=str(path))

"""Refuses a limit on the address space (``ulimit -v``) in which JAX cannot run.

Where memory for its threads is missing, JAX ends the process; an exception would be too late.
"""

from __future__ import annotations

import resource

import psutil

from jaxserve.config import MIB
from jaxserve.errors import ConfigError

BASE_MIB, MIB_PER_CPU = 1280, 128
"""Address space of an engine without a model, measured with jax 0.12 on 1 and 2 processors. Most of
it is reserved and never used."""

MAX_CPUS = 16
"""More processors do not count: with less address space, their threads share what is reserved."""


def check_address_space() -> None:
    """Raises ConfigError if this process, and the engines that it starts, may use too little."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    cpus = len(psutil.Process().cpu_affinity() or [0])
    needed_mib = BASE_MIB + MIB_PER_CPU * min(cpus, MAX_CPUS)
    if limit != resource.RLIM_INFINITY and limit < needed_mib * MIB:
        raise ConfigError(
            f"a process may use {limit // MIB} MiB of address space (ulimit -v), but JAX needs "
            f"about {needed_mib} MiB with {cpus} processors, and the weights and the KV cache take "
            "more; raise the limit, or limit the memory with a cgroup instead"
        )

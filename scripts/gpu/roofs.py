"""Measures the highest rates of the card, with which the other parts compare theirs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from gpu.options import Options
from gpu.report import Report
from gpu.timing import seconds

CHAIN = 4


def run(options: Options, report: Report) -> None:
    """Reports the rates of copying and reading memory and of a large matrix product."""
    device = jax.devices()[0]
    report.add(
        "device",
        kind=device.device_kind,
        jax=jax.__version__,
        memory_GB=(device.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
    )
    length = 2**16 if options.tiny else 2**30
    data = jnp.ones(length, jnp.bfloat16)
    copied = 2 * data.nbytes / seconds(jax.jit(lambda x: -x), data)
    read = data.nbytes / seconds(jax.jit(lambda x: jnp.max(x)), data)
    report.add("memory", copy_GBps=copied / 1e9, read_GBps=read / 1e9)
    size = 64 if options.tiny else 8192
    square = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) * size**-0.5
    spent = seconds(jax.jit(functools.partial(_products, times=CHAIN)), square)
    report.add("matrix product, bfloat16", matmul_TFLOPps=2 * size**3 * CHAIN / spent / 1e12)


def _products(square: jax.Array, *, times: int) -> jax.Array:
    x = square
    for _ in range(times):
        x = x @ square
    return x

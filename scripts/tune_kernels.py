#!/usr/bin/env python3
"""Finds the fastest tile sizes of the attention kernels for the GPU of this machine.

    python scripts/tune_kernels.py [--output FILE]
    python scripts/tune_kernels.py --tiny     # toy sizes on a CPU, to test this script

Times every candidate at the shapes of Llama-3.1-8B and SmolLM2-135M and prints a line for each. The
fastest become entries for the table in `pallas_kernels/tuning.py`; insert them above the general
entries. Decode is timed with 64 requests of 4096 tokens, prefill with one request of 8192.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from gpu.models import BLOCK_SIZE, spec_of
from gpu.timing import seconds
from gpu.workload import Pool, chained

from jaxserve.bench.output_file import check_output, replacing
from jaxserve.models.spec import ModelSpec
from pallas_kernels import tuning
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.tuning import KernelConfig

DTYPE = "bfloat16"
NUM_CALLS = 8
COMPILERS = 8  # candidates that compile at the same time


@dataclass(frozen=True)
class Sizes:
    """The models and the sizes of the workloads."""

    models: tuple[str, ...] = ("llama-3.1-8b", "smollm2-135m")
    decode_rows: int = 64
    decode_context: int = 4096
    prefill_tokens: int = 8192


TINY = Sizes(models=("tiny",), decode_rows=2, decode_context=32, prefill_tokens=16)


def candidates(kernel: str, *, tiny: bool) -> Iterator[KernelConfig]:
    """Yields the configurations to time."""
    if tiny:
        yield from (KernelConfig(16, 16, 4, 2), KernelConfig(16, 32, 4, 2))
        return
    if kernel == tuning.DECODE:
        for block_n, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
            yield KernelConfig(16, block_n, warps, stages)
        return
    for block_m, block_n, stages in itertools.product((64, 128), (32, 64, 128), (2, 3, 4)):
        # More than 64 rows do not fit the registers of four warps.
        for warps in (4, 8) if block_m == 64 else (8,):
            yield KernelConfig(block_m, block_n, warps, stages)


class Workload:
    """One kernel at the shapes of one model."""

    def __init__(self, kernel: str, spec: ModelSpec, sizes: Sizes) -> None:
        self._kernel, self._spec = kernel, spec
        rows, context = sizes.decode_rows, sizes.decode_context
        if kernel == tuning.RAGGED:
            rows, context = 1, sizes.prefill_tokens
        width = context // BLOCK_SIZE
        pool = Pool(spec, DTYPE, rows * context * NUM_CALLS)
        self._args = (
            pool.queries(rows if kernel == tuning.DECODE else context),
            pool.kv,
            pool.tables(NUM_CALLS, rows, context, width=width),
            jnp.full(rows, context, jnp.int32),
            jnp.arange(rows + 1, dtype=jnp.int32) * context,
        )

    def compiled(self, config: KernelConfig) -> Callable[..., jax.Array]:
        """Compiles the kernel with a configuration, which takes long and may fail."""
        return chained(self._call(config)).lower(*self._args).compile()

    def seconds(self, program: Callable[..., jax.Array]) -> float:
        """Returns the seconds of one call of the kernel."""
        return seconds(program, *self._args) / NUM_CALLS

    def _call(self, config: KernelConfig) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {
            "scale": self._spec.head_dim**-0.5,
            "config": config,
            "interpret": jax.default_backend() == "cpu",
        }

        def call(q: Any, kv: Any, table: Any, lens: Any, starts: Any) -> jax.Array:
            if self._kernel == tuning.DECODE:
                return paged_decode(q, kv.k, kv.v, table, lens, 0, **options)
            return ragged_attention(q, kv.k, kv.v, table, lens, starts, 0, **options)

        return call


def tune(kernel: str, model: str, sizes: Sizes, *, tiny: bool) -> KernelConfig:
    """Times all candidates, prints the time of each, and returns the fastest.

    Raises:
      RuntimeError: no candidate compiles.
    """
    workload = Workload(kernel, spec_of(model), sizes)
    configs = list(candidates(kernel, tiny=tiny))
    times: dict[KernelConfig, float] = {}
    with ThreadPoolExecutor(COMPILERS) as pool:
        programs = [pool.submit(workload.compiled, config) for config in configs]
        for config, program in zip(configs, programs, strict=True):
            error = program.exception()
            # Some candidates need more shared memory than the device has.
            times[config] = math.inf if error else workload.seconds(program.result())
            note = f"  {type(error).__name__}" if error else ""
            print(
                f"{kernel:7s} {model:14s} {config} {times[config] * 1e6:10.1f} us{note}", flush=True
            )
    best = min(times, key=lambda config: times[config])
    if math.isinf(times[best]):
        raise RuntimeError(f"no candidate of {kernel} compiles for {model}")
    return best


def entry(kernel: str, spec: ModelSpec, config: KernelConfig, device: str) -> str:
    """Returns an entry of the table, for heads of up to this size and groups that fit the tile."""
    name = {tuning.DECODE: "DECODE", tuning.RAGGED: "RAGGED"}[kernel]
    sizes = f"{config.block_m}, {config.block_n}, {config.num_warps}, {config.num_stages}"
    return (
        f"    _Entry({name}, KernelConfig({sizes}), max_head_dim={spec.head_dim}, "
        f'max_group={config.block_m}, device="{device}"),'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file that receives the lines of the table")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, interpreted on a CPU")
    options = parser.parse_args(arguments)
    if jax.default_backend() == "cpu" and not options.tiny:
        print("there is no GPU to tune for", file=sys.stderr)
        return 2
    if options.output is not None:
        check_output(options.output)
    start = time.monotonic()
    sizes = TINY if options.tiny else Sizes()
    device = jax.devices()[0].device_kind
    # The first matching line of the table wins, so lines for smaller heads come first.
    specs = sorted((spec_of(model).head_dim, model) for model in sizes.models)
    lines = []
    for kernel, (_, model) in itertools.product((tuning.DECODE, tuning.RAGGED), specs):
        best = tune(kernel, model, sizes, tiny=options.tiny)
        lines.append(entry(kernel, spec_of(model), best, device))
    text = "\n".join(lines)
    print(f"\nfor the table, after {time.monotonic() - start:.0f} s:\n{text}")
    if options.output is not None:
        with replacing(options.output) as path:
            path.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

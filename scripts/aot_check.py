#!/usr/bin/env python3
"""Compiles every kernel and whole steps for an H200 without a GPU, and reports on the result.

    python scripts/aot_check.py [--filter REGEX] [--layers N] [--dump FOLDER]

Each kernel has one line: grid and warps, registers per thread, bytes spilled to memory, bytes of
shared memory, programs that fit on a multiprocessor at once (an estimate), matrix instructions of a
warp group (wgmma) and of a warp (mma), and asynchronous 16-byte loads.

Each step of a model has one line: CUDA graphs that the host launches, operations inside and outside
the graphs, kernels and the number of kernels that spill, bytes of the KV cache and last tokens,
bytes of results written in place, bytes of other memory, copies of the size of a cache,
instructions that are recomputed to save memory, and sums over devices. Bytes are those of each
device. Sums over devices are captured in graphs, as with --capture-collectives.

Exits with 1 if a case does not compile, spills, or copies an array that it should write in place,
if a step is not one CUDA graph or recomputes anything, or if a step of several devices has other
sums than two for each layer and one for the embedding. Exits with 2 if the compiler is not
installed: the wheels jax-cuda13-plugin and jax-cuda13-pjrt for the installed version of jax, and a
ptxas for PTX 9.0 or newer, which counts the registers. The wheels need no CUDA driver or toolkit.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from aot_cases import Case, cases
from aot_dump import Report, dump_options, find_ptxas, read_dump
from aot_steps import STEP_COLUMNS, STEP_HEADER, StepCase, compile_step, step_cases

from jaxserve.client.launcher import CAPTURE_COLLECTIVES
from pallas_kernels.testing import deviceless

COLUMNS = "{:36s} {:22s} {:>14s} {:>5s} {:>4s} {:>5s} {:>6s} {:>6s} {:>5s} {:>4s} {:>5s}"
HEADER = (
    "case",
    "kernel",
    "grid",
    "warps",
    "regs",
    "spill",
    "shared",
    "per SM",
    "wgmma",
    "mma",
    "load",
)


def row(case: str, report: Report) -> str:
    """Returns the line of the table for a kernel."""
    numbers = (
        report.threads // 32,
        report.registers,
        report.spilled,
        report.shared,
        report.programs_per_sm,
        report.num_wgmma,
        report.num_mma,
        report.num_async_loads,
    )
    return COLUMNS.format(case, report.kernel, report.grid, *map(str, numbers))


def compile_case(case: Case, folder: Path, ptxas: str) -> list[Report]:
    """Compiles a case and keeps the compiler's files in ``folder``.

    Raises:
      RuntimeError: the program copies a donated argument, or lacks a kernel.
    """
    program = deviceless.compile_for_h200(
        jax.jit(case.fn, donate_argnums=case.donated),
        *case.args,
        compiler_options=dump_options(folder),
    )
    memory = program.memory_analysis()
    shared, scratch = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    if case.donated and (shared < case.donated_bytes or scratch >= case.donated_bytes):
        raise RuntimeError(
            f"copies an array that it could write in place: of {case.donated_bytes} donated bytes "
            f"{shared} are reused, and {scratch} more are allocated"
        )
    return list(read_dump(folder, case.kernels, ptxas))


def check_kernels(case: Case, folder: Path, ptxas: str) -> tuple[int, int]:
    """Compiles a case and prints its lines; returns the numbers of good and of bad kernels."""
    try:
        reports = compile_case(case, folder, ptxas)
    except Exception as error:  # any error of the compiler becomes a line of the table
        print(f"{case.name:36s} FAILED: {type(error).__name__}: {error}", flush=True)
        return 0, 1
    for report in reports:
        print(row(case.name, report), "SPILLS" if report.spilled else "", flush=True)
    num_bad = sum(report.spilled > 0 for report in reports)
    return len(reports) - num_bad, num_bad


def check_step(
    case: StepCase, folder: Path, ptxas: str, *, num_layers: int | None
) -> tuple[int, int]:
    """Compiles a step and prints its line; returns the numbers of good and of bad steps."""
    try:
        report = compile_step(case, folder, ptxas, num_layers=num_layers)
    except Exception as error:
        print(f"{case.name:36s} FAILED: {type(error).__name__}: {error}", flush=True)
        return 0, 1
    print(report.row(case.name), "; ".join(report.problems), flush=True)
    return (0, 1) if report.problems else (1, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", default="", help="compile only the cases whose name matches")
    parser.add_argument("--layers", type=int, help="layers of each model in the steps; unset: all")
    parser.add_argument("--dump", type=Path, help="keep the compiler's files in this folder")
    options = parser.parse_args(arguments)
    ptxas = find_ptxas()
    if not deviceless.is_available() or ptxas is None:
        missing = "ptxas" if deviceless.is_available() else "the wheel jax-cuda13-plugin"
        print(f"cannot compile for a GPU here: {missing} is missing", file=sys.stderr)
        return 2
    # The CUDA plugin is only the compiler here: it provides no device.
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = " ".join([CAPTURE_COLLECTIVES, os.environ.get("XLA_FLAGS", "")])
    print(f"jax {jax.__version__}, for {deviceless.DEVICE}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dump or Path(scratch)
        kernels = functools.partial(check_kernels, ptxas=ptxas)
        steps = functools.partial(check_step, ptxas=ptxas, num_layers=options.layers)
        counts = [
            *run(kernels, cases(), options.filter, folder, COLUMNS.format(*HEADER)),
            *run(steps, step_cases(), options.filter, folder, STEP_COLUMNS.format(*STEP_HEADER)),
        ]
    num_good, num_bad = (sum(each) for each in zip((0, 0), *counts, strict=True))
    print(f"{num_good} good, {num_bad} bad")
    return 1 if num_bad or not num_good else 0


def run(
    check: Callable[..., tuple[int, int]],
    found: Iterable[Case | StepCase],
    pattern: str,
    folder: Path,
    header: str,
) -> list[tuple[int, int]]:
    """Checks the cases whose name matches, below a header if there are any."""
    chosen = [case for case in found if re.search(pattern, case.name)]
    if chosen:
        print(header)
    return [check(case, folder / re.sub(r"\W+", "_", case.name)) for case in chosen]


if __name__ == "__main__":
    sys.exit(main())

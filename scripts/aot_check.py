#!/usr/bin/env python3
"""Compiles every kernel, and whole steps, for an H200 without one, and prints what became of them.

    python scripts/aot_check.py [--filter REGEX] [--layers N] [--dump FOLDER]

One line a kernel: its grid and warps, registers a thread, bytes spilled to memory, bytes of shared
memory, programs that fit on a multiprocessor at once (an estimate), matrix instructions of a warp
group (wgmma) and of a warp (mma), and asynchronous 16-byte loads.

One line a step of a model: CUDA graphs that the host starts, operations in them and outside of
them, kernels and how many of those spill, bytes of the KV cache and last tokens, of results that
are written in place and of memory used besides, copies of the size of a cache, and what is computed
again to save memory.

Exits with 1 if something does not compile, spills, or copies what it should write in place, or if a
step is not one CUDA graph or computes something twice, and with 2 if the compiler is not installed:
the wheels jax-cuda13-plugin and jax-cuda13-pjrt of the version of jax (no driver, no toolkit), and
a ptxas that knows PTX 9.0 or newer, for the registers.
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
    """The line of the table."""
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
    """Compiles a case, leaving the compiler's files in ``folder``."""
    program = deviceless.compile_for_h200(
        jax.jit(case.fn, donate_argnums=case.donated),
        *case.args,
        compiler_options=dump_options(folder),
    )
    memory = program.memory_analysis()
    shared, scratch = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    if case.donated and (shared < case.donated_bytes or scratch >= case.donated_bytes):
        raise RuntimeError(
            f"copies what it could write in place: {case.donated_bytes} bytes are given, {shared} "
            f"are taken over, {scratch} are used besides"
        )
    return list(read_dump(folder, case.kernels, ptxas))


def check_kernels(case: Case, folder: Path, ptxas: str) -> tuple[int, int]:
    """Compiles a case and prints its lines; returns how many kernels are good, and how many bad."""
    try:
        reports = compile_case(case, folder, ptxas)
    except Exception as error:  # whatever the compiler may raise is a line of the table
        print(f"{case.name:36s} FAILED: {type(error).__name__}: {error}", flush=True)
        return 0, 1
    for report in reports:
        print(row(case.name, report), "SPILLS" if report.spilled else "", flush=True)
    num_bad = sum(report.spilled > 0 for report in reports)
    return len(reports) - num_bad, num_bad


def check_step(
    case: StepCase, folder: Path, ptxas: str, *, num_layers: int | None
) -> tuple[int, int]:
    """The same for a whole step, which counts as one."""
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
    parser.add_argument("--filter", default="", help="only the cases whose name matches")
    parser.add_argument("--layers", type=int, help="of the models of steps; unset: all of them")
    parser.add_argument("--dump", type=Path, help="keep the compiler's files in this folder")
    options = parser.parse_args(arguments)
    ptxas = find_ptxas()
    if not deviceless.is_available() or ptxas is None:
        missing = "ptxas" if deviceless.is_available() else "the wheel jax-cuda13-plugin"
        print(f"cannot compile for a GPU here: {missing} is missing", file=sys.stderr)
        return 2
    # The CUDA plugin is a compiler here, not a device.
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
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
    """Checks the cases whose name matches, under a header if there are any."""
    chosen = [case for case in found if re.search(pattern, case.name)]
    if chosen:
        print(header)
    return [check(case, folder / re.sub(r"\W+", "_", case.name)) for case in chosen]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compiles every kernel for an H200, without one, and prints what the compiler made of it.

    python scripts/aot_check.py [--filter REGEX] [--dump FOLDER]

One line a kernel: its grid and warps, registers a thread, bytes spilled to memory, bytes of shared
memory, programs that fit on a multiprocessor at once (an estimate), matrix instructions of a warp
group (wgmma) and of a warp (mma), and asynchronous 16-byte loads.

Exits with 1 if a kernel does not compile, spills, or copies what it should write in place, and with
2 if the compiler is not installed: the wheels jax-cuda13-plugin and jax-cuda13-pjrt of the version
of jax (no driver, no toolkit), and a ptxas that knows PTX 9.0 or newer, for the registers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from aot_cases import Case, cases

from pallas_kernels import deviceless

# Of one multiprocessor of an H200.
REGISTERS = 65536
SHARED_BYTES = 233472
THREADS = 2048
MAX_PROGRAMS = 32
RESERVED_SHARED_BYTES = 1024  # a program, on top of what it asks for

COLUMNS = "{:34s} {:22s} {:>14s} {:>5s} {:>4s} {:>5s} {:>6s} {:>6s} {:>5s} {:>4s} {:>5s}"
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


@dataclass(frozen=True)
class Report:
    """What became of one kernel; bytes unless a name says otherwise."""

    kernel: str
    grid: str
    threads: int
    shared: int
    registers: int
    spilled: int
    num_wgmma: int
    num_mma: int
    num_async_loads: int

    @property
    def programs_per_sm(self) -> int:
        """How many programs a multiprocessor has room for."""
        warps = self.threads // 32
        registers_per_warp = -(-self.registers * 32 // 256) * 256  # given out in units of 256
        return min(
            REGISTERS // (registers_per_warp * warps),
            SHARED_BYTES // (self.shared + RESERVED_SHARED_BYTES),
            THREADS // self.threads,
            MAX_PROGRAMS,
        )

    def row(self, case: str) -> str:
        """The line of the table."""
        return COLUMNS.format(
            case,
            self.kernel,
            self.grid,
            *map(
                str,
                (
                    self.threads // 32,
                    self.registers,
                    self.spilled,
                    self.shared,
                    self.programs_per_sm,
                    self.num_wgmma,
                    self.num_mma,
                    self.num_async_loads,
                ),
            ),
        )


def compile_case(case: Case, folder: Path, ptxas: str) -> list[Report]:
    """Compiles a case, leaving the compiler's files in ``folder``."""
    program = deviceless.compile_for_h200(
        case.fn,
        *case.args,
        donate_argnums=case.donated,
        compiler_options={
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_emitter_re": "ptx",
        },
    )
    memory = program.memory_analysis()
    shared, scratch = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    if case.donated and (shared < case.donated_bytes or scratch >= case.donated_bytes):
        raise RuntimeError(
            f"copies what it could write in place: {case.donated_bytes} bytes are given, {shared} "
            f"are taken over, {scratch} are used besides"
        )
    return list(read_dump(folder, case.kernels, ptxas))


def read_dump(folder: Path, kernels: tuple[str, ...], ptxas: str) -> Iterator[Report]:
    """Reads what the compiler left in ``folder`` about the kernels named."""
    launch = re.compile(
        r"kCustomKernel\s+\[[^\]]*\]\s+(\S+) grid: \[([\d, ]+)\] threads: \[(\d+)[^\]]*\]"
        r"\s+shared_memory: (\d+)"
    )
    thunks = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    launches = {
        m[1]: (m[2].replace(", ", "x"), int(m[3]), int(m[4])) for m in launch.finditer(thunks)
    }
    codes = {}
    for path in folder.glob("*.ptx"):
        entry = re.search(r"\.entry (\w+)", path.read_text())
        if entry:
            codes[entry[1]] = path
    for kernel in kernels:
        if kernel not in launches or kernel not in codes:
            raise RuntimeError(f"the compiled program has no kernel {kernel!r}: {sorted(launches)}")
        grid, threads, shared = launches[kernel]
        registers, spilled = resources(codes[kernel], ptxas)
        code = codes[kernel].read_text()
        yield Report(
            kernel=kernel,
            grid=grid,
            threads=threads,
            shared=shared,
            registers=registers,
            spilled=spilled,
            num_wgmma=len(re.findall(r"wgmma\.mma_async", code)),
            num_mma=len(re.findall(r"\bmma\.sync", code)),
            num_async_loads=len(re.findall(r"cp\.async\.c[ga]\.shared\.global.*?, 0x10", code)),
        )


def resources(code: Path, ptxas: str) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, of the one kernel in a PTX file."""
    target = re.search(r"\.target\s+(sm_\w+)", code.read_text())
    assert target is not None
    command = [ptxas, "-v", f"--gpu-name={target[1]}", str(code), "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    log = result.stdout + result.stderr
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if result.returncode or registers is None or spilled is None:
        raise RuntimeError(f"ptxas failed: {log.strip()}")
    return int(registers[1]), int(spilled[1])


def find_ptxas() -> str | None:
    """The assembler of the toolkit or of the wheel nvidia-cuda-nvcc."""
    wheels = [str(Path(p) / "nvidia/cu13/bin") for p in sys.path]
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *wheels])
    return shutil.which("ptxas", path=places)


def check(case: Case, folder: Path, ptxas: str) -> tuple[int, int]:
    """Compiles a case and prints its lines; returns how many kernels are good, and how many bad."""
    try:
        reports = compile_case(case, folder / re.sub(r"\W+", "_", case.name), ptxas)
    except Exception as error:  # whatever the compiler may raise is a line of the table
        print(f"{case.name:34s} FAILED: {type(error).__name__}: {error}", flush=True)
        return 0, 1
    for report in reports:
        print(report.row(case.name), "SPILLS" if report.spilled else "", flush=True)
    num_bad = sum(report.spilled > 0 for report in reports)
    return len(reports) - num_bad, num_bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", default="", help="only the cases whose name matches")
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
    print(COLUMNS.format(*HEADER))
    num_good, num_bad = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases():
            if re.search(options.filter, case.name):
                good, bad = check(case, options.dump or Path(scratch), ptxas)
                num_good, num_bad = num_good + good, num_bad + bad
    print(f"{num_good} good, {num_bad} bad")
    return 1 if num_bad or not num_good else 0


if __name__ == "__main__":
    sys.exit(main())

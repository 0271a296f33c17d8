"""Reads the files that the compiler dumps about a program: its kernels and its CUDA graphs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The resources of one multiprocessor of an H200.
REGISTERS = 65536
SHARED_BYTES = 233472
THREADS = 2048
MAX_PROGRAMS = 32
RESERVED_SHARED_BYTES = 1024  # for each program, in addition to the bytes that it requests
# The dumped file that lists the operations of a program in order.
LISTING = "*.thunk_sequence_after_thunk_passes.txt"


def dump_options(folder: Path) -> dict[str, Any]:
    """Returns the compiler options that dump the files for the functions below."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_emitter_re": "ptx",
    }


@dataclass(frozen=True)
class Report:
    """The resources and instructions of one kernel; ``shared`` and ``spilled`` are in bytes."""

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
        """The number of programs that a multiprocessor has room for."""
        warps = self.threads // 32
        registers_per_warp = -(-self.registers * 32 // 256) * 256  # allocated in units of 256
        return min(
            REGISTERS // (registers_per_warp * warps),
            SHARED_BYTES // (self.shared + RESERVED_SHARED_BYTES),
            THREADS // self.threads,
            MAX_PROGRAMS,
        )


@dataclass(frozen=True)
class Launches:
    """The launches that the host makes to run a program once.

    Attributes:
      num_graphs: CUDA graphs.
      num_in_graphs: operations inside graphs.
      outside: operations outside graphs.
    """

    num_graphs: int
    num_in_graphs: int
    outside: tuple[str, ...]


def read_dump(folder: Path, kernels: tuple[str, ...], ptxas: str) -> Iterator[Report]:
    """Yields a report for each of ``kernels``, read from the dump in ``folder``.

    Raises:
      RuntimeError: the program lacks one of the kernels, or ptxas fails.
    """
    launch = re.compile(
        r"kCustomKernel\s+\[[^\]]*\]\s+(\S+) grid: \[([\d, ]+)\] threads: \[(\d+)[^\]]*\]"
        r"\s+shared_memory: (\d+)"
    )
    thunks = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    launches = {
        m[1]: (m[2].replace(", ", "x"), int(m[3]), int(m[4])) for m in launch.finditer(thunks)
    }
    codes = find_kernels(folder)
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


def find_kernels(folder: Path) -> dict[str, Path]:
    """Returns the PTX file of every kernel of the program in ``folder``, by kernel name."""
    codes = {}
    for path in folder.glob("*.ptx"):
        entry = re.search(r"\.entry (\w+)", path.read_text())
        if entry:
            codes[entry[1]] = path
    return codes


def resources(code: Path, ptxas: str) -> tuple[int, int]:
    """Returns registers per thread and bytes spilled of the only kernel in a PTX file.

    Raises:
      RuntimeError: ptxas fails.
    """
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
    """Returns the assembler of the toolkit or of the wheel nvidia-cuda-nvcc, if installed."""
    wheels = [str(Path(p) / "nvidia/cu13/bin") for p in sys.path]
    folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *wheels])
    return shutil.which("ptxas", path=folders)


def read_launches(listing: Path) -> Launches:
    """Reads the launches of a program from the list of its operations (`LISTING`)."""
    num_graphs, num_in_graphs, outside = 0, 0, []
    for line in listing.read_text().splitlines():
        operation = re.match(r"(\s*)\d+: (k\w+)\s+(?:\[[^\]]*\]\s*)?(.*)", line)
        if operation is None:
            continue
        indent, kind, what = operation.groups()
        if indent:
            num_in_graphs += 1
        elif kind == "kCommandBuffer":
            num_graphs += 1
        else:
            outside.append(f"{kind} {what}".strip())
    return Launches(num_graphs, num_in_graphs, tuple(outside))

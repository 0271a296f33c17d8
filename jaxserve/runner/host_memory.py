"""Reads how much memory of the host a process may still take: machine, cgroups and rlimits.

A container sees the memory of the whole machine in /proc/meminfo, but the kernel kills it at the
limit of its cgroup, or of any parent of it. See cgroup-v1/memory.rst and cgroup-v2.rst of the
kernel, and proc_pid_mountinfo(5). Swap does not count: an engine that swaps is of no use.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that this process may still take.

    Attributes:
      num_bytes: bytes, at least 0.
      limited_by: what limits it, for messages.
      limit_bytes: the limit, of which a part is in use.
    """

    num_bytes: int
    limited_by: str
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class _Version:
    """The files and keys of a version of cgroups."""

    limits: tuple[str, ...]
    used: str
    page_cache: tuple[str, ...]


# Above memory.high, the kernel slows a process down until it has given memory back.
_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def free_memory(proc: Path = PROC) -> FreeMemory:
    """Returns the memory that is free under every limit, and the tightest limit.

    ``proc`` is the folder of the proc file system; without one, only the machine and rlimits count.
    """
    tightest = min(_limits(proc), key=lambda each: each.num_bytes)
    return replace(tightest, num_bytes=max(tightest.num_bytes, 0))


def memory_limit(proc: Path = PROC) -> int:
    """Returns the bytes that the machine, or the tightest limit below that, has in all."""
    return min(each.limit_bytes for each in _limits(proc))


def _limits(proc: Path) -> Iterator[FreeMemory]:
    machine = psutil.virtual_memory()
    yield FreeMemory(machine.available, "the memory of the machine", machine.total)
    yield from _under_cgroups(proc)
    yield from _under_rlimits(proc)


def _under_cgroups(proc: Path) -> Iterator[FreeMemory]:
    """Yields the free memory under the limit of each cgroup of this process and its parents."""
    for folder, version in _cgroups(proc):
        for name in version.limits:
            limit, used = _number(folder / name), _number(folder / version.used)
            if limit is None or used is None:
                continue
            # The kernel drops pages of files before it kills.
            used -= _page_cache(folder / "memory.stat", version)
            what = f"{name} of the cgroup {folder}: {limit >> 20} MiB"
            # By all its processes, so the front counts, too.
            what += f", of which its processes use {used >> 20} MiB"
            yield FreeMemory(limit - used, what, limit)


def _cgroups(proc: Path) -> Iterator[tuple[Path, _Version]]:
    """Yields the folders of the cgroups of this process, each followed by its parents."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        for root, mount in _mounts(proc, version):
            inside = os.path.relpath(path, root)
            # A container often sees its own cgroup as the root of the mount, under another path.
            folder = mount if inside.startswith("..") else mount / inside
            yield folder, version
            while folder != mount:
                folder = folder.parent
                yield folder, version


def _mounts(proc: Path, version: _Version) -> Iterator[tuple[str, Path]]:
    """Yields (the cgroup at the top of the mount, the mount point) of each mount with limits."""
    for line in _lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = (field.replace("\\040", " ") for field in before.split()[3:5])
        kind, _, options = after.split(" ", 2)  # the source between them can be empty
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if is_v1 if version is _V1 else kind == "cgroup2":
            yield root, Path(mount)


def _page_cache(stat: Path, version: _Version) -> int:
    values = dict(line.split() for line in _lines(stat))
    return sum(int(values.get(key, 0)) for key in version.page_cache)


def _under_rlimits(proc: Path) -> Iterator[FreeMemory]:
    """Yields the free memory under RLIMIT_AS and RLIMIT_DATA, if they are set."""
    sizes = [field for line in _lines(proc / "self/statm") for field in line.split()]
    for limit_of, place, name in (
        (resource.RLIMIT_AS, 0, "ulimit -v"),
        (resource.RLIMIT_DATA, 5, "ulimit -d"),
    ):
        limit, _ = resource.getrlimit(limit_of)
        if limit != resource.RLIM_INFINITY and sizes:
            used = int(sizes[place]) * resource.getpagesize()
            what = f"the limit of this process, {name}: {limit >> 20} MiB"
            yield FreeMemory(limit - used, f"{what}, of which it uses {used >> 20} MiB", limit)


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or if it says "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0] != "max" else None


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file, or none if this process cannot read it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

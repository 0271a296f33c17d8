"""The memory, descriptors and processes of a server."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

DESCRIPTORS_OF_RESTARTS = 8
"""Connections of engines that were restarted may be closed a little later."""


@dataclass(frozen=True)
class Held:
    """The memory of a server without its engines in bytes, its descriptors, and its children."""

    memory_bytes: int
    num_descriptors: int
    num_processes: int

    @classmethod
    def by(cls, front: psutil.Process) -> Held:
        """Returns the current state of the server with this main process."""
        own = [front, *children_of(front, "server.front")]
        return cls(
            sum(process.memory_info().rss for process in own),
            sum(process.num_fds() for process in own),
            len(front.children(recursive=True)),
        )

    def is_within(self, before: Held) -> bool:
        """Whether a server holds no more than before a job, but for what its allocator keeps."""
        return (
            self.num_processes <= before.num_processes
            and self.num_descriptors <= before.num_descriptors + DESCRIPTORS_OF_RESTARTS
            and self.memory_bytes < 1.2 * before.memory_bytes + 2**24
        )


def children_of(front: psutil.Process, module: str) -> list[psutil.Process]:
    """Returns the children that run a module."""
    found: list[psutil.Process] = []
    for child in front.children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found

"""Runs the server as a process and reads its memory and processor time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

import jaxserve
from jaxserve.bench.http import get_status
from jaxserve.errors import JaxserveError

HOST = "127.0.0.1"
POLL_S = 0.02
STOP_TIMEOUT_S = 20.0


class ServerFailedError(JaxserveError):
    """The server under test ended early."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The peak memory of the front and of all engines together, in bytes."""

    front_bytes: int
    engine_bytes: int


class ServerProcess:
    """Runs ``python -m server`` on a free port until the context manager exits.

    Attributes:
      port: TCP port of the server.
      began_s: time of the start, by `time.monotonic`.
    """

    def __init__(self, flags: Sequence[str], *, log: Path) -> None:
        """Starts the server without waiting for it. Its output goes to ``log``."""
        self.port = _free_port()
        self.began_s = time.monotonic()
        self._log = log
        # Finds the server next to this package, whatever the current directory holds.
        search_path = [str(Path(jaxserve.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "server", *flags, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))},
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process ID of the front."""
        return self._process.pid

    async def until_healthy(self) -> None:
        """Waits until the server is healthy. Raises ServerFailedError if it exits instead."""
        while await get_status(HOST, self.port, "/health") != 200:
            if self._process.poll() is not None:
                log = self._log.read_text(errors="replace")
                raise ServerFailedError(
                    f"the server ended with exit code {self._process.returncode}:\n{log[-4000:]}"
                )
            await asyncio.sleep(POLL_S)

    def peak_memory(self) -> ProcessMemory:
        """Returns the peak memory so far."""
        front, *engines = map(_peak_bytes, self._processes())
        return ProcessMemory(front, sum(engines))

    def cpu_seconds(self) -> float:
        """Returns the processor time of all processes so far, in seconds."""
        return sum(map(_cpu_seconds, self._processes()))

    def front_cpu_seconds(self) -> float:
        """Returns the processor time of the front alone so far, in seconds."""
        return _cpu_seconds(psutil.Process(self._process.pid))

    def _processes(self) -> list[psutil.Process]:
        """Returns the front, followed by its engines."""
        front = psutil.Process(self._process.pid)
        return [front, *front.children(recursive=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _peak_bytes(process: psutil.Process) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]

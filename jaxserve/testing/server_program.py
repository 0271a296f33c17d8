"""Runs ``python -m server`` as a process, for tests of its signals, its output and its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from jaxserve.testing.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
FAKE = ("--engine-factory", "jaxserve.testing.fake_engine:build")


class ServerProgram:
    """A ``python -m server`` in a session of its own, and its output.

    Args:
      *args: the arguments of the server.
      cwd: its working directory, where it finds the model.
      shell: a shell command that runs before the server, in its process, such as ``ulimit -n 64``.
      program: the arguments of Python that run another program instead.
      stderr: the file descriptor of its standard error output; None reads it into ``output``.
      **environment: variables that replace those of this process.
    """

    def __init__(
        self,
        *args: object,
        cwd: Path = ROOT,
        shell: str | None = None,
        program: Sequence[str] = ("-m", "server"),
        stderr: int | None = None,
        **environment: str,
    ) -> None:
        command = [sys.executable, *program, *map(str, args)]
        if shell is not None:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{cwd}", **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    @property
    def url(self) -> str:
        """The URL of the server; waits until it is ready."""
        return self.wait_for(r"URL +(http://\S+)/v1")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the output contains a match, and returns it."""
        with self._changed:
            self._changed.wait_for(
                lambda: re.search(pattern, self.output) or not self._reader.is_alive(), TIMEOUT_S
            )
        match = re.search(pattern, self.output)
        assert match, self.output
        return match

    def wait_for_imports(self, package: str = "msgspec") -> None:
        """Waits until the process has imported the native part of a package."""
        maps = Path(f"/proc/{self.process.pid}/maps")
        wait_until(lambda: package in maps.read_text())

    def signal(self, *numbers: int) -> None:
        """Sends signals to the front alone."""
        for number in numbers:
            self.process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """Returns the front and its children."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def wait(self, *, within_s: float = TIMEOUT_S) -> int:
        """Waits until the process has exited, and returns the exit code."""
        code = self.process.wait(within_s)
        self._reader.join(within_s)
        return code

    def close(self) -> None:
        """Kills the process if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextlib.contextmanager
def server_program(*args: object, **options) -> Iterator[ServerProgram]:
    """Runs a `ServerProgram` until the block exits."""
    program = ServerProgram(*args, **options)
    try:
        yield program
    finally:
        program.close()


def assert_gone(processes: Sequence[psutil.Process], *, temporary: Path) -> None:
    """Asserts that the processes end, and that their sockets are gone from a temporary folder."""
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert not alive
    assert not list(temporary.glob("jaxserve-*"))

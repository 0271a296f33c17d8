"""Starts a process of this server as a child, and makes sure that it ends. See `ipc.parent`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec

from jaxserve.ipc.parent import encode_settings

logger = logging.getLogger(__name__)

STDERR = 2

STDIN_CLOSED_TIMEOUT_S = 3.0
"""Seconds that a process may take to exit after its standard input was closed."""

KILL_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to end: a call of a driver may have to return first."""


class ChildProcess:
    """A child process, from start to exit.

    Its standard input stays open as long as this process lives and needs the child, which exits at
    once when it closes. The child runs in its own session: Ctrl-C in a terminal goes to a whole
    process group, but should reach this process only, which decides when the child ends. The
    standard error output of this process shows all output of the child.

    Create it on the thread of the running asyncio loop: Linux kills the child when the thread that
    started it ends.
    """

    def __init__(
        self,
        module: str,
        settings: msgspec.Struct,
        *,
        name: str,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts ``python -m module``.

        Args:
          module: the module to run.
          settings: the first line of its standard input; see `ipc.parent`.
          name: names the process in the log.
          environment: its environment variables. `module_path` is added, so that it imports the
            same modules.
          pass_fds: the file descriptors that it inherits, besides the standard streams.

        Raises:
          OSError: the system has no resources for a process or a thread.
        """
        self._name = name
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = subprocess.Popen(
            # -P: the child imports modules from where this process does (PYTHONPATH), not from the
            # current folder.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=STDERR,
            env={**environment, "PYTHONPATH": module_path(sys.path)},
            pass_fds=pass_fds,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        watch = threading.Thread(
            target=self._wait, args=(self._exit_code.get_loop(),), name="child-exit", daemon=True
        )
        try:
            watch.start()
        except RuntimeError as error:  # no more threads
            self._process.kill()
            self._process.wait()
            self.close_stdin()
            raise OSError(str(error)) from error
        with contextlib.suppress(BrokenPipeError):  # already dead: `wait` returns the exit code
            self._process.stdin.write(encode_settings(settings))

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running, as far as the event loop knows."""
        return not self._exit_code.done()

    async def wait(self) -> int:
        """Waits for the exit and returns the exit code; -n if signal n killed the process."""
        return await asyncio.shield(self._exit_code)

    async def stop(self, *, timeout_s: float) -> int:
        """Ends the process and returns its exit code.

        The process has ``timeout_s`` seconds to exit by itself (0: none). Then its standard input
        is closed, which makes it exit whatever it is doing. If it does not exit, it is killed.
        """
        if not await self._ends_within(timeout_s):
            self.close_stdin()
            if not await self._ends_within(STDIN_CLOSED_TIMEOUT_S):
                self._process.kill()
        return await self.wait()

    async def kill(self) -> None:
        """Kills the process, whatever it is doing, and waits until the kernel has ended it."""
        self._process.kill()
        if not await self._ends_within(KILL_TIMEOUT_S):
            logger.error("%s (pid %d) cannot be killed", self._name, self.pid)

    def close_stdin(self) -> None:
        """Closes the standard input of the process. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _ends_within(self, timeout_s: float) -> bool:
        await asyncio.wait([self._exit_code], timeout=timeout_s)
        return self._exit_code.done()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for the process on a thread, which works on every platform."""
        exit_code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no waiter
            loop.call_soon_threadsafe(self._on_exit, exit_code)

    def _on_exit(self, exit_code: int) -> None:
        self.close_stdin()
        self._exit_code.set_result(exit_code)


def module_path(folders: Sequence[str]) -> str:
    """Returns the value of PYTHONPATH for a child that imports from ``folders``."""
    return os.pathsep.join(os.path.abspath(folder) for folder in folders)

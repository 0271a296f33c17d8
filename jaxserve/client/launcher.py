"""Starts an engine as a child process, and sees to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

import msgspec

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.ipc.launch import Launch

STDERR = 2

HANG_UP_TIMEOUT_S = 3.0
"""How long a process may take to leave after its standard input was closed."""

ENVIRONMENT = {
    # XLA's C++ log: errors only. Its warnings are about its own tuning and say nothing to users.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Variables that an engine gets unless the front's environment has them."""

XLA_FLAGS: tuple[str, ...] = ()
"""Flags that come before those in the front's own ``XLA_FLAGS``, which therefore win."""


class EngineProcess:
    """One engine process, from start to exit.

    Its standard input stays open as long as the front lives and wants the engine: its end tells
    the child to leave at once. The child has a session of its own, so that Ctrl-C in a terminal,
    which goes to the whole group, reaches the front only, and the front decides what ends when.
    What the child prints goes to the front's standard error.

    Make it on the thread of the running asyncio loop: Linux kills the child when the thread that
    started it ends.
    """

    def __init__(self, launch: Launch) -> None:
        """Starts the process.

        Raises:
          ConfigError: there are fewer devices than engines.
        """
        self.engine = launch.engine
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = subprocess.Popen(
            # -P: the child finds modules where the front does (PYTHONPATH), not in the folder
            # from which it happens to be started.
            [sys.executable, "-P", "-m", "jaxserve.engine.process"],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=STDERR,
            env=child_environment(launch, os.environ, sys.path),
            start_new_session=True,
        )
        threading.Thread(
            target=self._wait, args=(self._exit_code.get_loop(),), name="engine-exit", daemon=True
        ).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died already: `wait` will say so
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended, as far as the loop has heard."""
        return not self._exit_code.done()

    async def wait(self) -> int:
        """Waits for the end and returns the exit code; negative: the signal that killed it."""
        return await asyncio.shield(self._exit_code)

    async def stop(self, *, timeout_s: float) -> int:
        """Sees to the end of the process and returns its exit code.

        It has ``timeout_s`` seconds to end by itself (0: end it now), then its standard input is
        closed, on which it leaves wherever it is; if it still cannot, it is killed.
        """
        if not await self._ends_within(timeout_s):
            self.hang_up()
            if not await self._ends_within(HANG_UP_TIMEOUT_S):
                self._process.kill()
        return await self.wait()

    def hang_up(self) -> None:
        """Closes the standard input of the process. May be called again."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _ends_within(self, timeout_s: float) -> bool:
        await asyncio.wait([self._exit_code], timeout=timeout_s)
        return self._exit_code.done()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: waiting costs nothing there, and works on every platform."""
        exit_code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended, exit_code)

    def _ended(self, exit_code: int) -> None:
        self.hang_up()
        self._exit_code.set_result(exit_code)


def child_environment(
    launch: Launch, inherited: Mapping[str, str], module_path: list[str]
) -> dict[str, str]:
    """The environment of an engine: the front's, its module search path, and our settings."""
    xla_flags = " ".join([*XLA_FLAGS, inherited.get("XLA_FLAGS", "")]).strip()
    return {
        **ENVIRONMENT,
        **memory_settings(launch.config.cache, inherited),
        **inherited,
        **({"XLA_FLAGS": xla_flags} if xla_flags else {}),
        **_own_device(launch, inherited),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in module_path),
    }


def memory_settings(cache: CacheConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that tell jax how much of a GPU to take, which by itself is three quarters.

    None if the environment ``inherited`` says so already; jax refuses both of its names.
    """
    names = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if names & inherited.keys():
        return {}
    return {"XLA_CLIENT_MEM_FRACTION": f"{cache.pool_fraction:.3f}"}


def _own_device(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Of several engines, each sees one GPU: by itself each would take the first."""
    num_engines = launch.config.parallel.data_parallel_size
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if num_engines == 1 or visible == "":
        return {}
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(launch.engine)}
    devices = visible.split(",")
    if len(devices) < num_engines:
        raise ConfigError(
            f"--data-parallel-size {num_engines} needs as many GPUs, and CUDA_VISIBLE_DEVICES has "
            f"{len(devices)}: {visible}"
        )
    return {"CUDA_VISIBLE_DEVICES": devices[launch.engine].strip()}

"""Starts an engine as a child process, and makes sure that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from itertools import takewhile

import msgspec

from jaxserve.config import CacheConfig, CompileConfig
from jaxserve.device import NVIDIA_DRIVER
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.ipc.launch import Launch

logger = logging.getLogger(__name__)

STDERR = 2

STDIN_CLOSED_TIMEOUT_S = 3.0
"""Seconds that a process may take to exit after its standard input was closed."""

KILL_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to end: a call of a driver may have to return first."""

ENVIRONMENT = {
    # Show only errors of XLA's C++ code: its warnings are about its own tuning.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment variables of an engine, unless the environment of the front sets them."""

CAPTURE_COLLECTIVES = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
"""The flag of XLA that adds sums over devices to the operations that CUDA graphs may contain."""


class EngineProcess:
    """One engine process, from start to exit.

    Its standard input stays open as long as the front lives and needs the engine; the child exits
    at once when it closes. The child runs in its own session: Ctrl-C in a terminal goes to a whole
    process group, but should reach the front only, which decides when the engines end. The front's
    standard error output shows all output of the child.

    Create it on the thread of the running asyncio loop: Linux kills the child when the thread that
    started it ends.
    """

    def __init__(self, launch: Launch) -> None:
        """Starts the process.

        Raises:
          ConfigError: there are fewer visible GPUs than the engines need.
          EngineDeadError: the system has no resources for the process or for a thread.
        """
        self.engine = launch.engine
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        environment = child_environment(
            launch, os.environ, sys.path, has_gpus=NVIDIA_DRIVER.exists()
        )
        try:
            self._process = subprocess.Popen(
                # -P: the child imports modules from where the front does (PYTHONPATH), not from the
                # current folder.
                [sys.executable, "-P", "-m", "jaxserve.engine.process"],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=STDERR,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise _unstartable(launch, error) from error
        assert self._process.stdin is not None
        try:
            threading.Thread(
                target=self._wait,
                args=(self._exit_code.get_loop(),),
                name="engine-exit",
                daemon=True,
            ).start()
        except RuntimeError as error:  # no more threads
            self._process.kill()
            self._process.wait()
            self.close_stdin()
            raise _unstartable(launch, error) from error
        with contextlib.suppress(BrokenPipeError):  # already dead: `wait` returns the exit code
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")

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
            logger.error("engine %d (pid %d) cannot be killed", self.engine, self.pid)

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


def _unstartable(launch: Launch, error: Exception) -> EngineDeadError:
    return EngineDeadError(f"the process of engine {launch.engine} cannot be started: {error}")


def child_environment(
    launch: Launch, inherited: Mapping[str, str], module_path: list[str], *, has_gpus: bool
) -> dict[str, str]:
    """Returns the environment of an engine: the front's own, its module path and our settings.

    ``has_gpus``: whether the machine has NVIDIA GPUs.

    Raises:
      ConfigError: there are fewer visible GPUs than the engines need.
    """
    return {
        **ENVIRONMENT,
        **memory_settings(launch.config.cache, inherited),
        **inherited,
        **xla_flags(launch.config.compile, inherited),
        **_visible_devices(launch, inherited, has_gpus=has_gpus),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in module_path),
    }


def xla_flags(config: CompileConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable with the flags of XLA, unless it stays as it is.

    Inherited flags come last: XLA takes the last of equal flags.
    """
    if not config.capture_collectives:
        return {}
    return {"XLA_FLAGS": f"{CAPTURE_COLLECTIVES} {inherited.get('XLA_FLAGS', '')}".strip()}


def memory_settings(cache: CacheConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that set the fraction of GPU memory that jax preallocates.

    Returns none if the environment ``inherited`` sets the fraction: jax refuses to have both names
    set. The default of jax is three quarters.
    """
    names = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if names & inherited.keys():
        return {}
    return {"XLA_CLIENT_MEM_FRACTION": f"{cache.pool_fraction:.3f}"}


def _visible_devices(
    launch: Launch, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """Returns variables that show an engine its own GPUs, if the engines use several.

    Without them every engine would use the first GPUs, and reserve memory on all. Where jax uses
    the CPU, the devices are simulated, and there may be fewer GPUs.
    """
    parallel = launch.config.parallel
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if parallel.num_devices == 1:
        return {}
    if visible is None:
        devices = list(map(str, range(parallel.num_devices)))
    else:  # CUDA ignores what follows an invalid entry, so "" and "-1" hide all GPUs.
        entries = (entry.strip() for entry in visible.split(","))
        devices = list(takewhile(lambda entry: entry not in ("", "-1"), entries))
    if len(devices) < parallel.num_devices:
        on_cpu = inherited.get("JAX_PLATFORMS", "").split(",")[0].strip() == "cpu"
        if not devices or on_cpu or not has_gpus:
            return {}
        raise ConfigError(
            f"--data-parallel-size {parallel.data_parallel_size} and --tensor-parallel-size "
            f"{parallel.tensor_parallel_size} need {parallel.num_devices} GPUs, but "
            f"CUDA_VISIBLE_DEVICES has {len(devices)}: {visible}"
        )
    first = launch.engine * parallel.tensor_parallel_size
    own = devices[first : first + parallel.tensor_parallel_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

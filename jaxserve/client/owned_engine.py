"""One engine process and what its owner does: starts it, notices its end, stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from jaxserve.client.death import Death, exited
from jaxserve.client.launcher import EngineProcess
from jaxserve.client.link import Link
from jaxserve.client.replica import Observers, Replica
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.launch import FAILED_EXIT_CODE, Launch
from jaxserve.ipc.messages import Shutdown, StepStats
from jaxserve.ipc.socket_folder import remove_socket

logger = logging.getLogger(__name__)

EXIT_REASON_TIMEOUT_S = 2.0
"""Seconds to wait for `EngineFailed` after a process has ended with `FAILED_EXIT_CODE`."""

CATCH_UP_S = 1.0
"""Seconds to handle events that have arrived, before an engine counts as stuck, and after its
process has ended without a report."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The seconds for which an engine may send nothing. An idle one sends a heartbeat every second.

    Attributes:
      suspect_s: then it gets no new requests.
      dead_s: then it counts as dead.
    """

    suspect_s: float
    dead_s: float


class OwnedEngine:
    """An engine process of this process, from its start to its end.

    Attributes:
      process: the process.
      replica: what this process sees of it, as reader 0.
    """

    def __init__(
        self,
        launch: Launch,
        number: int,
        context: zmq.asyncio.Context,
        observers: Observers,
        silence: Silence,
        *,
        before: Replica | None = None,
    ) -> None:
        """Starts the process.

        Args:
          launch: the settings of the process.
          number: the number of the process.
          context: makes the sockets.
          observers: see `Observers`.
          silence: applies once the engine can serve. To a restart, it applies from the beginning.
          before: the dead replica that this one replaces.

        Raises:
          ConfigError: there are fewer visible GPUs than the engines need, or the socket for events
            cannot be bound.
          EngineDeadError: the system has no resources for a process.
        """
        self._silence = silence
        self._is_restart = before is not None
        self.replica = Replica(
            Link(launch.engine, number, 0, launch.requests_address, launch.events_address),
            context,
            observers,
            suspect_s=silence.suspect_s,
            stats_before=None if before is None else _restarted(before.stats),
        )
        try:
            self.process = EngineProcess(launch)
        except BaseException:
            self.replica.abandon()
            raise
        self.replica.name = f"engine {launch.engine} (pid {self.process.pid})"
        loop = asyncio.get_running_loop()
        watches = (self._watch_process(), self._watch_silence())
        self._tasks = [loop.create_task(self._guard(watch)) for watch in watches]

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Ends the process, and waits until it has exited and the sockets are closed.

        An engine that can serve gets a `Shutdown` and ``timeout_s`` seconds to exit.
        """
        sender = self.replica.retire(error, Shutdown())
        await self.process.stop(timeout_s=timeout_s if sender is not None else 0)
        if sender is not None:
            sender.close()
        await self._close()

    async def remove(self) -> None:
        """Kills the process of a dead engine, and closes the sockets."""
        await self.process.kill()
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replica.close()
        remove_socket(self.replica.link.requests_address)

    async def _guard(self, watch: Coroutine[None, None, None]) -> None:
        """Runs a watch. If it fails, the engine counts as dead: nobody would notice its end."""
        try:
            await watch
        except Exception as error:
            logger.exception("the supervision of %s failed", self.replica.name)
            reason = f"the supervision of {self.replica.name} failed: {error}"
            self.replica.die(Death(EngineDeadError(reason)))

    async def _watch_process(self) -> None:
        """Notices the end of the process, for whatever reason."""
        exit_code = await self.process.wait()
        if exit_code == FAILED_EXIT_CODE:  # EngineFailed may still be in the socket
            await asyncio.wait([self.replica.death], timeout=EXIT_REASON_TIMEOUT_S)
        await self.replica.end(timeout_s=CATCH_UP_S)
        self.replica.die(exited(self.replica.name, exit_code))

    async def _watch_silence(self) -> None:
        """Notices that the engine hangs."""
        replica, dead_s = self.replica, self._silence.dead_s
        if not self._is_restart:
            await asyncio.wait([replica.ready])
        while True:
            await asyncio.sleep(max(dead_s - replica.silent_s, 0))
            if replica.silent_s >= dead_s:
                await asyncio.sleep(CATCH_UP_S)
            if replica.silent_s >= dead_s:
                replica.die(Death(EngineDeadError(replica.stuck_message())))
                return


def _restarted(stats: StepStats) -> StepStats:
    return msgspec.structs.replace(stats, total_restarts=stats.total_restarts + 1)

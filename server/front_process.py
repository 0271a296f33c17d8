"""One front process as the main process sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from jaxserve.client.death import STARTUP_ERRORS, exited
from jaxserve.errors import JaxserveError
from jaxserve.ipc.child_process import ChildProcess
from jaxserve.ipc.control import (
    Aborted,
    AbortRequests,
    Alive,
    FromFront,
    FrontFailed,
    FrontUp,
    ToFront,
)
from jaxserve.ipc.control_channel import ControlChannel
from jaxserve.ipc.launch import FAILED_EXIT_CODE
from server.abort_calls import AbortCalls
from server.connections import ConnectionSender
from server.launch import FrontLaunch

logger = logging.getLogger(__name__)

EXIT_REASON_TIMEOUT_S = 2.0
"""Seconds to wait for `FrontFailed` after a process has ended with `FAILED_EXIT_CODE`."""

WATCH_INTERVAL_S = 1.0
"""Seconds between two looks at how long a front has been silent."""

CATCH_UP_S = 1.0
"""Seconds to handle messages that arrived while the main process itself was stopped, before a front
counts as stuck."""

ABORT_TIMEOUT_S = 5.0
"""Seconds that a front has to abort requests; a front that hangs must not stop those of others."""


@dataclass(frozen=True, slots=True)
class FrontSilence:
    """The seconds for which a front may send nothing. It sends `Alive` about every second.

    Attributes:
      start_s: a new front that has sent nothing is killed then.
      suspect_s: then it gets no new connections.
      dead_s: then it is killed.
    """

    start_s: float = 120.0
    suspect_s: float = 5.0
    dead_s: float = 30.0


class FrontProcess:
    """One front process from its start to its end. A restarted front is a new one.

    Attributes:
      launch: its settings.
      process: the process.
      up: set when the front can serve; or the error that ended its start.
      ended: set, with the reason, when the process has ended or must be killed.
      connections: takes connections to the front.
    """

    def __init__(
        self,
        launch: FrontLaunch,
        context: zmq.asyncio.Context,
        silence: FrontSilence,
        *,
        on_abort: Callable[[FrontProcess, AbortRequests], None],
    ) -> None:
        """Starts the process.

        Args:
          launch: the settings of the process; ``connections_fd`` is replaced.
          context: makes the control sockets.
          silence: applies as soon as the front takes connections.
          on_abort: called when the front wants requests of the other fronts aborted.

        Raises:
          ConfigError: a control socket cannot be bound.
          OSError: the system has no resources for a process.
        """
        loop = asyncio.get_running_loop()
        self.up: asyncio.Future[FrontUp] = loop.create_future()
        self.ended: asyncio.Future[JaxserveError] = loop.create_future()
        self._silence = silence
        self._on_abort = on_abort
        self._began_s = time.monotonic()
        self._last_message_s: float | None = None
        self._up_s: float | None = None
        self._channel = ControlChannel.of_main(context, launch.control)
        self.aborts = AbortCalls(self._channel.send, timeout_s=ABORT_TIMEOUT_S)
        self.connections = ConnectionSender()
        descriptor = self.connections.child_end.fileno()
        self.launch = msgspec.structs.replace(launch, connections_fd=descriptor)
        try:
            self.process = ChildProcess(
                "server.front",
                self.launch,
                name=f"front {launch.index}",
                environment=os.environ,
                pass_fds=(descriptor, launch.counts_fd),
            )
        except BaseException:
            self._channel.close()
            self.connections.close()
            raise
        finally:
            self.connections.child_end.close()
        watches = (self._listen(), self._watch_process(), self._watch_silence())
        self._tasks = [loop.create_task(watch) for watch in watches]

    @property
    def takes_connections(self) -> bool:
        """Whether the front should get another connection."""
        return (
            self._last_message_s is not None
            and not self.ended.done()
            and self._silent_s <= self._silence.suspect_s
            and self.connections.can_send
        )

    @property
    def serves(self) -> bool:
        """Whether the front can serve requests."""
        return self._up_s is not None and not self.ended.done()

    @property
    def served_s(self) -> float:
        """Seconds since the front could serve; 0 if it cannot yet."""
        return 0.0 if self._up_s is None else time.monotonic() - self._up_s

    def send(self, message: ToFront) -> None:
        """Sends a message. It is lost if the front has ended."""
        if not self.ended.done():
            self._channel.send(message)

    async def remove(self) -> list[socket.socket]:
        """Kills the process, closes the sockets, and returns connections that it did not take."""
        self._end(JaxserveError(f"{self._name} has been stopped"))
        await self.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()
        self.launch.control.remove()
        self.aborts.close()
        return self.connections.close()

    async def _listen(self) -> None:
        try:
            while True:
                self._handle(await self._channel.receive())
        except Exception as error:
            # Without this task, the front would seem to be silent.
            logger.exception("the control channel of %s failed", self._name)
            self._end(JaxserveError(f"the control channel of {self._name} failed: {error}"))

    def _handle(self, message: FromFront) -> None:
        self._last_message_s = time.monotonic()
        match message:
            case Alive():
                pass
            case FrontUp():
                self._up_s = self._last_message_s
                self.up.set_result(message)
            case FrontFailed(message=text, error_type=kind):
                self._end(STARTUP_ERRORS.get(kind, JaxserveError)(text))
            case AbortRequests():
                self._on_abort(self, message)
            case Aborted():
                self.aborts.handle(message)

    async def _watch_process(self) -> None:
        exit_code = await self.process.wait()
        if exit_code == FAILED_EXIT_CODE:  # FrontFailed may still be in the socket
            await asyncio.wait([self.ended], timeout=EXIT_REASON_TIMEOUT_S)
        self._end(exited(self._name, exit_code).error)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._silent_s >= self._most_silent_s:
                await asyncio.sleep(CATCH_UP_S)
            if self._silent_s >= self._most_silent_s:
                hangs = f"{self._name} hangs: it has sent nothing for {self._silent_s:.0f} s"
                self._end(JaxserveError(hangs))
                return

    def _end(self, error: JaxserveError) -> None:
        """Marks the front as ended. Later calls have no effect."""
        if self.ended.done():
            return
        self.ended.set_result(error)
        if not self.up.done():
            self.up.set_exception(error)
            self.up.exception()  # marks it as retrieved: there may be no waiter

    @property
    def _silent_s(self) -> float:
        """Seconds since the last message, or since the start."""
        return time.monotonic() - (self._last_message_s or self._began_s)

    @property
    def _most_silent_s(self) -> float:
        has_begun = self._last_message_s is not None
        return self._silence.dead_s if has_begun else self._silence.start_s

    @property
    def _name(self) -> str:
        return f"front {self.launch.index} (pid {self.process.pid})"

"""One engine process as the front sees it: its sockets, its state and its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

import msgspec
import zmq.asyncio

from jaxserve.client.balancer import Load
from jaxserve.client.death import Death, exited, reported
from jaxserve.client.in_flight import InFlight
from jaxserve.client.launcher import EngineProcess
from jaxserve.client.totals import continued
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.launch import FAILED_EXIT_CODE, Launch
from jaxserve.ipc.messages import (
    Abort,
    EngineEvent,
    EngineFailed,
    Progress,
    Ready,
    Shutdown,
    StepOutputs,
    StepStats,
)
from jaxserve.ipc.transport import EventReceiver, RequestSender, remove_socket

logger = logging.getLogger(__name__)

EXIT_REASON_TIMEOUT_S = 2.0
"""Seconds to wait for `EngineFailed` after a process has ended with `FAILED_EXIT_CODE`."""

CATCH_UP_S = 1.0
"""Seconds to handle events that arrived while the front itself was stopped, before an engine counts
as stuck."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Called with the events of an engine, before they are handled further."""

    outputs: Callable[[StepOutputs], None]
    progress: Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Silence:
    """The seconds for which an engine may send nothing. An idle one sends a heartbeat every second.

    Attributes:
      suspect_s: then it gets no new requests.
      dead_s: then it counts as dead.
    """

    suspect_s: float
    dead_s: float


class Replica:
    """One engine process from its start to its end. A restarted engine is a new replica.

    Attributes:
      process: the process.
      ready: the resolved settings once the engine can serve, or the error that ended its start.
      requests: the requests in flight on the engine, by ID, oldest first.
      stats: the latest state of the engine. Totals include those of the replicas before it.
      death: set when the engine is dead.
    """

    def __init__(
        self,
        launch: Launch,
        context: zmq.asyncio.Context,
        observers: Observers,
        silence: Silence,
        *,
        before: Replica | None = None,
    ) -> None:
        """Starts the process.

        Args:
          launch: the settings of the process.
          context: makes the sockets.
          observers: see `Observers`.
          silence: applies once the engine can serve. To a restart, it applies from the beginning.
          before: the dead replica that this one replaces.

        Raises:
          ConfigError: there are fewer visible GPUs than the engines need.
          OSError: the system has no resources for a process.
        """
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.death: asyncio.Future[Death] = loop.create_future()
        self.requests: dict[str, InFlight] = {}
        self._stats_before = None if before is None else _restarted(before.stats)
        self.stats = self._stats_before or StepStats()
        self._launch = launch
        self._context = context
        self._observers = observers
        self._silence = silence
        self._is_restart = before is not None
        self._sender: RequestSender | None = None
        self._num_sent = 0
        self._last_event_s = time.monotonic()
        self._ready_s: float | None = None
        self._events = EventReceiver(context, launch.events_address)
        try:
            self.process = EngineProcess(launch)
        except BaseException:
            self._events.close()
            raise
        watches = (self._listen(), self._watch_process(), self._watch_silence())
        self._tasks = [loop.create_task(watch) for watch in watches]

    @property
    def engine(self) -> int:
        """The index of the engine."""
        return self._launch.engine

    @property
    def can_serve(self) -> bool:
        """Whether the engine should get new requests."""
        return (
            self._sender is not None
            and not self.death.done()
            and self._silent_s <= self._silence.suspect_s
        )

    @property
    def load(self) -> Load:
        """The engine's current load."""
        return Load(self.stats.num_waiting, self.stats.num_running, self._num_sent)

    @property
    def served_s(self) -> float:
        """Seconds since the engine could serve; 0 if it cannot yet."""
        return 0.0 if self._ready_s is None else time.monotonic() - self._ready_s

    def submit(self, request: InFlight) -> None:
        """Sends a request, or the rest of one that a dead engine had begun."""
        assert self._sender is not None, "requests go to engines that are ready"
        # Does not fail if the process has just died: its death then moves the request.
        self._sender.send(request.remaining())
        # After `send`, so that a request that cannot be encoded is not in flight.
        self.requests[request.id] = request
        self._num_sent += 1

    def abort(self, request_ids: list[str]) -> None:
        """Takes requests from the engine. The caller ends their streams."""
        for request_id in request_ids:
            del self.requests[request_id]
        if request_ids and self._sender is not None:
            self._sender.send(Abort(request_ids))

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead, starting, or silent for too long."""
        if self.death.done():
            raise EngineDeadError(str(self.death.result().error))
        if self._sender is None:
            raise EngineDeadError(f"engine {self.engine} is being restarted")
        if not self.can_serve:
            raise EngineDeadError(self._stuck_message())

    def suspects(self, *, in_order: bool) -> AbstractSet[str]:
        """Returns the IDs of the requests that may have been running when the engine died.

        If the engine did not tell, these are the oldest ``max_num_seqs`` where the engine runs
        requests ``in_order`` of their arrival, else all.
        """
        if not self.requests:
            return set()
        told = self.death.result().running_ids
        if told is not None:
            return told & self.requests.keys()
        most = self.ready.result().max_num_seqs if in_order else None
        return set(islice(self.requests, most))

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Ends the process, and waits until it has exited and the sockets are closed.

        An engine that can serve gets a `Shutdown` and ``timeout_s`` seconds to exit.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.send(Shutdown())
        self._die(Death(error))
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
        self._events.close()
        for address in (self._launch.requests_address, self._launch.events_address):
            remove_socket(address)

    async def _listen(self) -> None:
        """Handles the events of the engine, for as long as the replica lives."""
        try:
            while True:
                # Takes all queued events at once, so that a slow reader gets one merged output.
                for event in await self._events.receive():
                    self._handle(event)
                # Lets the readers run even if the next event has already arrived.
                await asyncio.sleep(0)
        except Exception as error:
            # Without this task, no output arrives any more.
            logger.exception("the engine client failed")
            self._die(Death(EngineDeadError(f"the engine client failed: {error}")))

    async def _watch_process(self) -> None:
        """Notices the end of the process, for whatever reason."""
        exit_code = await self.process.wait()
        if exit_code == FAILED_EXIT_CODE:  # EngineFailed may still be in the socket
            await asyncio.wait([self.death], timeout=EXIT_REASON_TIMEOUT_S)
        self._die(exited(self._name, exit_code))

    async def _watch_silence(self) -> None:
        """Notices that the engine hangs."""
        if not self._is_restart:
            await asyncio.wait([self.ready])
        while True:
            await asyncio.sleep(max(self._silence.dead_s - self._silent_s, 0))
            if self._silent_s >= self._silence.dead_s:
                await asyncio.sleep(CATCH_UP_S)
            if self._silent_s >= self._silence.dead_s:
                self._die(Death(EngineDeadError(self._stuck_message())))
                return

    def _handle(self, event: EngineEvent) -> None:
        if self.death.done():  # sent before the engine died or was stopped
            return
        self._last_event_s = time.monotonic()
        match event:
            case StepOutputs():
                self._handle_outputs(event)
            case Progress():
                self._observers.progress(event)
            case Ready():
                self._ready_s = time.monotonic()
                self._sender = RequestSender(self._context, self._launch.requests_address)
                self.ready.set_result(event)
            case EngineFailed():
                if not event.is_user_error:
                    logger.error("engine %d failed:\n%s", event.engine, event.traceback)
                self._die(reported(event))

    def _handle_outputs(self, event: StepOutputs) -> None:
        """Stores the state of the engine and hands the outputs of a step to their streams."""
        if self._stats_before is not None:
            stats = continued(self._stats_before, event.stats)
            event = msgspec.structs.replace(event, stats=stats)
        self.stats = event.stats
        self._num_sent = 0
        self._observers.outputs(event)
        for output in event.outputs:
            request = self.requests.get(output.request_id)
            if request is None:  # aborted while the output was in the socket
                continue
            if output.finish_reason is not None:
                del self.requests[output.request_id]
            request.push(output)

    def _die(self, death: Death) -> None:
        """Marks the engine as dead. Later calls have no effect."""
        if self.death.done():
            return
        self.death.set_result(death)
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if not self.ready.done():
            self.ready.set_exception(death.error)
            self.ready.exception()  # marks it as retrieved: there may be no waiter
        self.stats = msgspec.structs.replace(self.stats, num_running=0, num_waiting=0, kv_usage=0.0)

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._last_event_s

    @property
    def _name(self) -> str:
        return f"engine {self.engine} (pid {self.process.pid})"

    def _stuck_message(self) -> str:
        return (
            f"{self._name} is stuck: it has sent nothing for {self._silent_s:.0f} s; requests in "
            f"flight: {len(self.requests)}"
        )


def _restarted(stats: StepStats) -> StepStats:
    return msgspec.structs.replace(stats, total_restarts=stats.total_restarts + 1)

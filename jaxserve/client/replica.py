"""One engine process as one of its readers sees it: sockets, state, load, requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

import msgspec
import zmq.asyncio

from jaxserve.client.balancer import Load
from jaxserve.client.death import Death, reported
from jaxserve.client.in_flight import InFlight
from jaxserve.client.link import Link
from jaxserve.client.totals import continued
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.messages import (
    Abort,
    AddReader,
    Arrived,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Progress,
    Ready,
    Received,
    StepOutputs,
    StepStats,
)
from jaxserve.ipc.socket_folder import remove_socket
from jaxserve.ipc.transport import EventReceiver, RequestSender

logger = logging.getLogger(__name__)


MAX_WOKEN = 100
"""Readers of about this many requests get outputs before they all run. That takes 15 ms at most."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Called with the events of an engine, before they are handled further."""

    outputs: Callable[[StepOutputs], None]
    progress: Callable[[Progress], None] = lambda _: None


class Replica:
    """One engine process from its start to its end. A restarted engine is a new replica.

    Attributes:
      link: the process and its addresses.
      name: of the process, for messages.
      ready: the resolved settings once the engine can serve, or the error that ended its start.
      requests: the requests in flight on the engine, by ID, oldest first.
      stats_before: the totals of the engine before this process; None if it is the first.
      stats: the latest state of the engine. Totals include those before this process.
      death: set when the engine is dead.
    """

    def __init__(
        self,
        link: Link,
        context: zmq.asyncio.Context,
        observers: Observers,
        *,
        suspect_s: float,
        stats_before: StepStats | None = None,
    ) -> None:
        """Binds the socket for events.

        Args:
          link: the process and its addresses.
          context: makes the sockets.
          observers: see `Observers`.
          suspect_s: an engine that has sent nothing for this many seconds gets no new requests. An
            idle one sends a heartbeat every second.
          stats_before: see the attribute.
        """
        loop = asyncio.get_running_loop()
        self.link = link
        self.name = f"engine {link.engine}"
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.death: asyncio.Future[Death] = loop.create_future()
        self.requests: dict[str, InFlight] = {}
        self.stats_before = stats_before
        self.stats = stats_before or StepStats()
        self._context = context
        self._observers = observers
        self._suspect_s = suspect_s
        self._sender: RequestSender | None = None
        # Requests since the process started: sent from here; handled, as it last reported; those of
        # other readers that have arrived, and that it had handled.
        self._num_sent = self._num_handled = 0
        self._others_arrived = self._others_handled = 0
        self._last_event_s = time.monotonic()
        self._ready_s: float | None = None
        self._receipt = asyncio.Event()
        self._events = EventReceiver(context, link.events_address)
        self._listening = loop.create_task(self._listen())

    @property
    def engine(self) -> int:
        """The index of the engine."""
        return self.link.engine

    @property
    def was_ready(self) -> bool:
        """Whether the engine can serve, or could before it died."""
        return self._ready_s is not None

    @property
    def can_serve(self) -> bool:
        """Whether the engine should get new requests."""
        return (
            self._sender is not None and not self.death.done() and self.silent_s <= self._suspect_s
        )

    @property
    def load(self) -> Load:
        """The engine's current load."""
        num_sent = self._num_sent - self._num_handled
        # What others sent before this reader came has arrived, but no message has said so yet.
        num_others = max(self._others_arrived - self._others_handled, 0)
        return Load(self.stats.num_waiting, self.stats.num_running, num_sent + num_others)

    @property
    def served_s(self) -> float:
        """Seconds since the engine could serve; 0 if it cannot yet."""
        return 0.0 if self._ready_s is None else time.monotonic() - self._ready_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last event of the engine's main thread."""
        return time.monotonic() - self._last_event_s

    def connect(self, ready: Ready) -> None:
        """Says that the engine can serve, and connects to it. Raises ConfigError."""
        link = self.link
        self._sender = RequestSender(self._context, link.requests_address, reader=link.reader)
        self._ready_s = time.monotonic()
        if link.reader:
            self._sender.send(AddReader(link.reader, link.events_address))
        self.ready.set_result(ready)

    def submit(self, request: InFlight) -> None:
        """Sends a request, or the rest of one that a dead engine had begun."""
        assert self._sender is not None, "requests go to engines that are ready"
        request.is_received = False
        # Does not fail if the process has just died: its death then moves the request.
        self._sender.send(request.remaining())
        # After `send`, so that a request that cannot be encoded is not in flight.
        self.requests[request.id] = request
        self._num_sent += 1

    def abort(self, request_ids: list[str]) -> None:
        """Takes requests from the engine. The caller ends their streams."""
        for request_id in request_ids:
            del self.requests[request_id]
        if request_ids:
            self.send(Abort(request_ids))

    def send(self, request: EngineRequest) -> None:
        """Sends an `Abort` or the like. Has no effect if the engine is dead or starting."""
        if self._sender is not None:
            self._sender.send(request)

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead, starting, or silent for too long."""
        if self.death.done():
            raise EngineDeadError(str(self.death.result().error))
        if self._sender is None:
            raise EngineDeadError(f"engine {self.engine} is being restarted")
        if not self.can_serve:
            raise EngineDeadError(self.stuck_message())

    def stuck_message(self) -> str:
        """Returns what to say about an engine that sends nothing."""
        return (
            f"{self.name} is stuck: it has sent nothing for {self.silent_s:.0f} s; requests in "
            f"flight: {len(self.requests)}"
        )

    def suspects(self, *, in_order: bool) -> AbstractSet[str]:
        """Returns the IDs of the requests that may have been running when the engine died.

        If the engine did not tell, these are the oldest ``max_num_seqs`` where the engine runs
        requests ``in_order`` of their arrival, else all. A request that was in a crash before is
        one of them only if the engine has said that it received it.
        """
        if not self.requests:
            return set()
        told = self.death.result().running_ids
        if told is not None:
            return told & self.requests.keys()
        most = self.ready.result().max_num_seqs if in_order else None
        received = (i for i, r in self.requests.items() if r.is_received or not r.num_crashes)
        return set(islice(received, most))

    async def end(self, *, timeout_s: float) -> None:
        """Takes no more requests, since the process has ended, and waits for its last `Received`.

        Waits at most ``timeout_s`` seconds, and only if some requests were in a crash before.
        """
        self._disconnect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(r.num_crashes and not r.is_received for r in self.requests.values()):
                    self._receipt.clear()
                    await self._receipt.wait()

    def retire(self, error: JaxserveError, last: EngineRequest) -> RequestSender | None:
        """Sends a last request and takes no more; ``error`` is the reason of the death.

        Returns the socket with the last request, which the caller closes; None if the engine cannot
        receive anything.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.send(last)
        self.die(Death(error))
        return sender

    def die(self, death: Death) -> None:
        """Marks the engine as dead. Later calls have no effect."""
        if self.death.done():
            return
        self.death.set_result(death)
        self._disconnect()
        if not self.ready.done():
            self.ready.set_exception(death.error)
            self.ready.exception()  # marks it as retrieved: there may be no waiter
        self.stats = msgspec.structs.replace(self.stats, num_running=0, num_waiting=0, kv_usage=0.0)

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def abandon(self) -> None:
        """Closes the socket of an engine whose process could not be started."""
        self._listening.cancel()
        self._events.close()

    async def close(self) -> None:
        """Closes the sockets of a dead engine, and removes their files."""
        assert self.death.done()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._events.close()
        remove_socket(self.link.events_address)

    async def _listen(self) -> None:
        """Handles the events of the engine, for as long as the replica lives."""
        try:
            while True:
                woken: set[str] = set()
                # Takes all queued events at once, so that a slow reader gets one merged output.
                for event in await self._events.receive():
                    self._handle(event)
                    if isinstance(event, StepOutputs):
                        woken.update(output.request_id for output in event.outputs)
                    if len(woken) > MAX_WOKEN:
                        await asyncio.sleep(0)
                        woken.clear()
                # Lets the readers run even if the next event has already arrived.
                await asyncio.sleep(0)
        except Exception as error:
            # Without this task, no output arrives any more.
            logger.exception("the engine client failed")
            self.die(Death(EngineDeadError(f"the engine client failed: {error}")))

    def _handle(self, event: EngineEvent) -> None:
        if self.death.done():  # sent before the engine died or was stopped
            return
        match event:
            case StepOutputs():
                self._last_event_s = time.monotonic()
                self._handle_outputs(event)
            case Arrived():
                # From the input thread of the engine, which runs even if the main thread hangs.
                self._others_arrived = event.num_other_submits
            case Received(request_id=request_id):
                if request_id in self.requests:
                    self.requests[request_id].is_received = True
                    self._receipt.set()
            case _:
                self._last_event_s = time.monotonic()
                self._handle_start_or_end(event)

    def _handle_start_or_end(self, event: Progress | Ready | EngineFailed) -> None:
        match event:
            case Progress():
                self._observers.progress(event)
            case Ready():
                self.connect(event)
            case EngineFailed():
                if not event.is_user_error:
                    logger.error("engine %d failed:\n%s", event.engine, event.traceback)
                self.die(reported(event))

    def _handle_outputs(self, event: StepOutputs) -> None:
        """Stores the state of the engine and hands the outputs of a step to their streams."""
        if self.stats_before is not None:
            stats = continued(self.stats_before, event.stats)
            event = msgspec.structs.replace(event, stats=stats)
        self.stats = event.stats
        self._num_handled, self._others_handled = event.num_submits, event.num_other_submits
        self._observers.outputs(event)
        for output in event.outputs:
            request = self.requests.get(output.request_id)
            if request is None:  # aborted while the output was in the socket
                continue
            if output.finish_reason is not None:
                del self.requests[output.request_id]
            request.push(output)

"""One engine process as the front sees it, and the choice between several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from jaxserve.client.launcher import EngineProcess
from jaxserve.client.output_stream import OutputStream
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.messages import (
    Abort,
    Ready,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
)
from jaxserve.ipc.transport import RequestSender

WAITING_WEIGHT = 4
"""A waiting request counts as this many running ones: its whole prompt must still be computed, and
the engine is full if a request has to wait."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine, as far as the front knows.

    Attributes:
      num_waiting, num_running: as the engine last reported them.
      num_sent: requests sent since that report arrived. They count as waiting.
    """

    num_waiting: int
    num_running: int
    num_sent: int = 0

    @property
    def score(self) -> int:
        """``WAITING_WEIGHT * waiting + running``."""
        return WAITING_WEIGHT * (self.num_waiting + self.num_sent) + self.num_running


class Balancer:
    """Picks the engine with the lowest score. Engines with equal scores take turns."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, loads: Mapping[int, Load]) -> int:
        """Returns the index of the engine for the next request.

        ``loads`` has at least one entry, by engine index.
        """
        best = min(load.score for load in loads.values())
        tied = sorted(engine for engine, load in loads.items() if load.score == best)
        self._last = next((engine for engine in tied if engine > self._last), tied[0])
        return self._last


class Replica:
    """An engine process, its requests in flight and its latest state.

    Attributes:
      process: the engine process.
      ready: the resolved settings once the engine can serve, or the error that ended its start.
      in_flight: the output streams of the requests in flight, by request ID.
      stats: the latest state of the engine.
      error: the reason why the engine is dead, or None.
      failed: set when the engine is dead.
    """

    def __init__(self, process: EngineProcess, request_ended: asyncio.Event) -> None:
        """``request_ended`` is set whenever a request leaves ``in_flight``."""
        self.process = process
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.in_flight: dict[str, OutputStream] = {}
        self.stats = StepStats()
        self.error: JaxserveError | None = None
        self.failed = asyncio.Event()
        self._request_ended = request_ended
        self._sender: RequestSender | None = None
        self._num_sent = 0
        self._last_event_s = time.monotonic()

    @property
    def load(self) -> Load:
        """The engine's current load."""
        return Load(self.stats.num_waiting, self.stats.num_running, self._num_sent)

    def set_ready(self, ready: Ready, sender: RequestSender) -> None:
        """Marks the engine as able to serve."""
        self._last_event_s = time.monotonic()
        self._sender = sender
        self.ready.set_result(ready)

    def submit(self, submit: Submit, stream: OutputStream) -> OutputStream:
        """Sends a request to the engine and returns the stream of its outputs."""
        assert self._sender is not None, "requests go to engines that are ready"
        # Does not fail if the engine has just died: `fail` then ends the stream.
        self._sender.send(submit)
        # After `send`, so that a request that cannot be encoded is not in flight.
        self.in_flight[submit.request_id] = stream
        self._num_sent += 1
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Aborts requests on the engine. The caller ends their streams."""
        assert self._sender is not None, "requests go to engines that are ready"
        self._sender.send(Abort(request_ids))
        for request_id in request_ids:
            self._remove(request_id)

    def handle_outputs(self, event: StepOutputs) -> None:
        """Stores the state of the engine and hands the outputs of a step to their streams."""
        self._last_event_s = time.monotonic()
        self.stats = event.stats
        self._num_sent = 0
        for output in event.outputs:
            stream = self.in_flight.get(output.request_id)
            if stream is None:  # aborted while the output was in the socket
                continue
            stream.push(output)
            if output.finish_reason is not None:
                self._remove(output.request_id)

    def fail(self, error: JaxserveError) -> None:
        """Marks the engine as dead and fails its requests. Later calls have no effect."""
        if self.error is not None:
            return
        self.error = error
        self.failed.set()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved: there may be no waiter
        self.stats = msgspec.structs.replace(self.stats, num_running=0, num_waiting=0, kv_usage=0.0)
        for request_id, stream in list(self.in_flight.items()):
            stream.fail(EngineDeadError(str(error)))
            self._remove(request_id)

    def check_health(self, *, stuck_after_s: float) -> None:
        """Raises EngineDeadError if the engine is dead, or has sent nothing for too long.

        An idle engine sends a heartbeat every second, so a silent one is stuck even if no request
        is in flight.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        silent_s = time.monotonic() - self._last_event_s
        if self.ready.done() and silent_s > stuck_after_s:
            raise EngineDeadError(
                f"engine {self.process.engine} (pid {self.process.pid}) is stuck: it has sent "
                f"nothing for {silent_s:.0f} s; requests in flight: {len(self.in_flight)}"
            )

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Fails the requests in flight and ends the process.

        An engine that can serve gets a `Shutdown` and ``timeout_s`` seconds to exit.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.send(Shutdown())
        self.fail(error)
        await self.process.stop(timeout_s=timeout_s if sender is not None else 0)
        if sender is not None:
            sender.close()

    def _remove(self, request_id: str) -> None:
        del self.in_flight[request_id]
        self._request_ended.set()

"""One engine as the front sees it: what is on board, how it does, whether it lives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from jaxserve.client.balance import Load
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


@dataclass(slots=True)
class InFlight:
    """A request on board of an engine, with all that it takes to run it on another one.

    ``token_ids`` are those generated so far: prompt and these, with ``num_prior_tokens`` raised by
    their number, make the `Submit` that goes on where this engine stopped.
    """

    submit: Submit
    stream: OutputStream = field(default_factory=OutputStream)
    token_ids: list[int] = field(default_factory=list)


class Replica:
    """An engine process, its requests and its newest state.

    Attributes:
      process: the engine.
      ready: what it settled on, once it can serve; or why it never will.
      in_flight: the requests on board, by id.
      stats: its newest state.
      error: why it is dead, or None.
      died: set when it is dead.
    """

    def __init__(self, process: EngineProcess, departed: asyncio.Event) -> None:
        """``departed`` is set whenever a request has left ``in_flight``."""
        self.process = process
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.in_flight: dict[str, InFlight] = {}
        self.stats = StepStats()
        self.error: JaxserveError | None = None
        self.died = asyncio.Event()
        self._departed = departed
        self._sender: RequestSender | None = None
        self._num_sent = 0
        self._heard_s = time.monotonic()

    @property
    def load(self) -> Load:
        """What the next request would come on top of."""
        return Load(self.stats.num_waiting, self.stats.num_running, self._num_sent)

    def serve(self, ready: Ready, sender: RequestSender) -> None:
        """The engine can take requests."""
        self._heard_s = time.monotonic()
        self._sender = sender
        self.ready.set_result(ready)

    def submit(self, submit: Submit) -> InFlight:
        """Sends a request to the engine."""
        assert self._sender is not None, "requests go to engines that are ready"
        # An engine that is gone is noticed by the end of its process, which fails the request.
        self._sender.send(submit)
        # Only now: what cannot be sent is not on board.
        request = InFlight(submit)
        self.in_flight[submit.request_id] = request
        self._num_sent += 1
        return request

    def abort(self, request_ids: list[str]) -> None:
        """Takes requests off the engine. Their streams are the caller's to end."""
        assert self._sender is not None, "requests go to engines that are ready"
        self._sender.send(Abort(request_ids))
        for request_id in request_ids:
            self._remove(request_id)

    def take(self, event: StepOutputs) -> None:
        """Hands the outputs of a step to their streams."""
        self._heard_s = time.monotonic()
        self.stats = event.stats
        self._num_sent = 0
        for output in event.outputs:
            request = self.in_flight.get(output.request_id)
            if request is None:  # aborted while the output was on its way
                continue
            request.token_ids += output.token_ids
            request.stream.push(output)
            if output.finish_reason is not None:
                self._remove(output.request_id)

    def die(self, error: JaxserveError) -> None:
        """The engine is gone: fails the requests on board. Only the first error counts."""
        if self.error is not None:
            return
        self.error = error
        self.died.set()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody has to wait for it
        self.stats = msgspec.structs.replace(self.stats, num_running=0, num_waiting=0, kv_usage=0.0)
        for request_id, request in list(self.in_flight.items()):
            request.stream.fail(EngineDeadError(str(error)))
            self._remove(request_id)

    def check_health(self, *, stuck_after_s: float) -> None:
        """Raises EngineDeadError if it is dead, or was not heard for so long.

        An idle engine says every second that it is there, so a silent one is stuck even if the
        clients of its requests have all given up.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        silent_s = time.monotonic() - self._heard_s
        if self.ready.done() and silent_s > stuck_after_s:
            raise EngineDeadError(
                f"engine {self.process.engine} (pid {self.process.pid}) is stuck: it was not heard "
                f"for {silent_s:.0f} s; requests on board: {len(self.in_flight)}"
            )

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Fails the requests on board and ends the process, politely if it serves."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.send(Shutdown())
        self.die(error)
        await self.process.stop(timeout_s=timeout_s if sender is not None else 0)
        if sender is not None:
            sender.close()

    def _remove(self, request_id: str) -> None:
        del self.in_flight[request_id]
        self._departed.set()

"""Spreads requests over engine processes, and moves them when an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import msgspec

from jaxserve.client.balancer import Balancer
from jaxserve.client.engines import Callbacks, Engines
from jaxserve.client.in_flight import InFlight
from jaxserve.client.output_stream import OutputStream
from jaxserve.client.replica import Replica
from jaxserve.client.supervisor import Supervisor
from jaxserve.config import EngineConfig
from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    RequestFailedError,
)
from jaxserve.ipc.launch import FACTORY
from jaxserve.ipc.messages import Progress, Ready, RequestOutput, StepOutputs, StepStats, Submit

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that an engine may take to exit after `Shutdown`: a step in flight has to end first."""

MAX_CRASHES = 2
"""A request that may have been running in this many crashes is not tried again."""


class EngineClient:
    """Implements `Engine` with one or more engine processes.

    An engine that dies or hangs is restarted. Its requests continue on another engine if one can
    serve, else on the first that is back. Until then they are parked.

    `start` also starts the engines. In a front of several, whose main process runs the engines,
    ``EngineClient(AttachedEngines(...), config)`` uses them.

    Call everything on the asyncio loop on which the client was created.

    Attributes:
      on_outputs: called with every `StepOutputs` before its outputs are handed to their streams;
        for metrics. It must not keep the outputs. Exceptions that it raises are logged.
    """

    def __init__(
        self, engines: Engines, config: EngineConfig, *, waits_for_engines: bool = False
    ) -> None:
        """Uses engines that are not ready yet.

        Args:
          engines: the engines, which `close` stops.
          config: the settings of every engine.
          waits_for_engines: see `start`.
        """
        self.on_outputs: Callable[[StepOutputs], None] | None = None
        self._waits_for_engines = waits_for_engines
        self._in_order = config.scheduler.policy == "fcfs"
        self._num_engines = config.parallel.data_parallel_size
        self._balancer = Balancer(first=engines.reader % self._num_engines)
        self._parked: dict[str, InFlight] = {}  # oldest first
        self._request_ended = asyncio.Event()
        self._engines = engines
        self._replicas = engines.replicas
        self._closing: asyncio.Task[None] | None = None
        engines.watch(Callbacks(self._observe, self._on_ready, self._move_requests))
        engines.gone.add_done_callback(lambda gone: self._fail_all(gone.result()))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        factory: str = FACTORY,
        on_progress: Callable[[Progress], None] | None = None,
        stuck_after_s: float = 60.0,
        waits_for_engines: bool = False,
    ) -> EngineClient:
        """Launches ``config.parallel.data_parallel_size`` engines and waits until all can serve.

        Args:
          config: the settings of every engine.
          factory: builds an engine in its process, as ``module:function``.
          on_progress: called with every progress report of a start-up.
          stuck_after_s: an engine that sends nothing for this many seconds gets no new requests and
            is not healthy. At most ``--engine-timeout``, after which it is killed.
          waits_for_engines: what happens to a new request while no engine can serve and one is
            being restarted: it waits; or, if false, it is refused with EngineDeadError.

        Raises:
          ConfigError, CheckpointError, UnsupportedModelError: the factory raised it; the user can
            fix the cause.
          EngineDeadError: an engine failed or died. Its traceback, if it sent one, is in the log.
        """
        supervisor = Supervisor(
            config,
            factory,
            stuck_after_s=stuck_after_s,
            on_progress=on_progress or (lambda _: None),
        )
        client = cls(supervisor, config, waits_for_engines=waits_for_engines)
        try:
            await supervisor.start()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def engines(self) -> Mapping[int, Ready]:
        """The resolved settings with which each engine started first, by its index."""
        return dict(sorted(self._engines.readies.items()))

    @property
    def ready(self) -> Ready:
        """The settings of the first engine, with the smallest sizes of all engines.

        Every engine must have been ready once.
        """
        readies = self._engines.readies
        sizes = ("max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
        smallest = {name: min(getattr(r, name) for r in readies.values()) for name in sizes}
        return msgspec.structs.replace(readies[0], **smallest)

    @property
    def gone(self) -> asyncio.Future[EngineDeadError]:
        """See `Engines.gone`."""
        return self._engines.gone

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The latest state of each engine, by its index. A dead engine has no requests."""
        return {engine: replica.stats for engine, replica in sorted(self._replicas.items())}

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight, parked ones included."""
        return sum(map(len, self._in_flight()))

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`. Sends the request to the engine with the lowest load score."""

        def ended() -> None:
            self._request_ended.set()
            if on_ended is not None:
                on_ended()

        in_flight = InFlight(request, OutputStream(ended))
        self._accept(in_flight)
        try:
            async for output in in_flight.stream:
                yield output
        finally:
            if not in_flight.stream.is_closed:  # the reader left before the end
                self._take([in_flight.id])
                in_flight.stream.close()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for request in self._take(request_ids):
            request.abort()

    def check_health(self) -> None:
        """Raises EngineDeadError unless every engine can serve."""
        if self.gone.done():
            raise EngineDeadError(str(self.gone.result()))
        if len(self._replicas) < self._num_engines:
            raise EngineDeadError("not every engine has started")
        for replica in self._replicas.values():
            replica.check_health()

    async def drain(self, timeout_s: float) -> None:
        """Waits until no request is in flight, at most ``timeout_s`` seconds; aborts the rest.

        Readers of aborted requests get a last output with reason ABORT. The caller has to refuse
        new requests meanwhile.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_in_flight:
                    self._request_ended.clear()
                    await self._request_ended.wait()
        self.abort(list(itertools.chain(*self._in_flight())))

    async def close(self, *, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Stops the engines and removes the sockets. Requests in flight fail with EngineDeadError.

        Engines that another process runs are not stopped; they abort the requests in flight.

        An engine that can serve has ``timeout_s`` seconds to end its step. Idempotent, even during
        another call. Cancelling the call does not stop the closing.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(timeout_s))
        await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        error = EngineDeadError("the engines have been shut down")
        self._fail_all(error)
        await self._engines.stop(error, timeout_s=timeout_s)
        self._fail_all(error)

    def _in_flight(self) -> tuple[dict[str, InFlight], ...]:
        """Returns the requests in flight in each place where they can be."""
        return (self._parked, *(replica.requests for replica in self._replicas.values()))

    def _accept(self, request: InFlight) -> None:
        """Sends a new request to an engine.

        Raises:
          InvalidRequestError: its ID is in use.
          EngineDeadError: no engine can serve.
        """
        if any(request.id in requests for requests in self._in_flight()):
            raise InvalidRequestError(
                f"the request ID {request.id!r} is in use by a request in flight",
                param="request_id",
            )
        if self._place(request):
            return
        is_closed = self._closing is not None or self.gone.done()
        if is_closed or not self._waits_for_engines:
            self.check_health()
        self._parked[request.id] = request

    def _place(self, request: InFlight) -> bool:
        """Sends a request to the engine with the lowest load; returns False if none can serve."""
        loads = {i: replica.load for i, replica in self._replicas.items() if replica.can_serve}
        if loads:
            self._replicas[self._balancer.pick(loads)].submit(request)
        return bool(loads)

    def _on_ready(self, _: Replica) -> None:
        self._place_parked()

    def _place_parked(self) -> None:
        for request in list(self._parked.values()):
            if not self._place(request):
                return
            del self._parked[request.id]

    def _move_requests(self, dead: Replica) -> None:
        """Moves the requests of a dead engine, except those that may have killed two."""
        suspects, requests = dead.suspects(in_order=self._in_order), list(dead.requests.values())
        dead.requests.clear()
        for request in requests:
            request.num_crashes += request.id in suspects
            if request.num_crashes >= MAX_CRASHES:
                request.stream.fail(_crashed(request, dead.death.result().error))
            elif not self._place(request):
                self._parked[request.id] = request

    def _take(self, request_ids: Iterable[str]) -> list[InFlight]:
        """Takes requests away from the engines. Returns those that were in flight."""
        ids = list(request_ids)
        taken = [self._parked.pop(i) for i in ids if i in self._parked]
        for replica in self._replicas.values():
            own = [i for i in ids if i in replica.requests]
            taken += [replica.requests[i] for i in own]
            replica.abort(own)
        return taken

    def _fail_all(self, error: JaxserveError) -> None:
        for requests in self._in_flight():
            failing = list(requests.values())
            requests.clear()
            for request in failing:
                request.stream.fail(error)

    def _observe(self, event: StepOutputs) -> None:
        if self._parked:  # an engine that was silent serves again
            self._place_parked()
        if self.on_outputs is not None:
            try:
                self.on_outputs(event)
            except Exception:
                logger.exception("the on_outputs callback failed")


def _crashed(request: InFlight, reason: JaxserveError) -> RequestFailedError:
    return RequestFailedError(
        f"the engine failed {request.num_crashes} times while it was running this request; the "
        f"last reason: {reason}"
    )

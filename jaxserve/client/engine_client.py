"""Engines in processes: starts them, spreads requests over them, handles their events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import zmq.asyncio

from jaxserve.client.launcher import EngineProcess
from jaxserve.client.replica import Balancer, Replica
from jaxserve.config import EngineConfig
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    UnsupportedModelError,
)
from jaxserve.ipc.launch import FACTORY, FAILED_EXIT_CODE, Launch
from jaxserve.ipc.messages import (
    EngineEvent,
    EngineFailed,
    FinishReason,
    Progress,
    Ready,
    RequestOutput,
    StepOutputs,
    StepStats,
    Submit,
)
from jaxserve.ipc.transport import EventReceiver, RequestSender, SocketFolder

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that an engine may take to exit after `Shutdown`: a step in flight has to end first."""

EXIT_REASON_TIMEOUT_S = 2.0
"""Seconds to wait for `EngineFailed` after a process has ended with `FAILED_EXIT_CODE`."""

STARTUP_ERRORS: Mapping[str, type[JaxserveError]] = {
    error.__name__: error for error in (ConfigError, CheckpointError, UnsupportedModelError)
}
"""The errors of a factory that `EngineClient.start` raises with their own type."""


class EngineClient:
    """Implements `Engine` with one or more engine processes.

    Call everything on the asyncio loop on which `start` was called.

    Attributes:
      on_outputs: called with every `StepOutputs` before its outputs are handed to their streams;
        for metrics. It must not keep the outputs. Exceptions that it raises are logged.
    """

    def __init__(self, *, stuck_after_s: float = 60.0) -> None:
        """Creates the sockets only. Use `start`, which also launches the engines."""
        self.on_outputs: Callable[[StepOutputs], None] | None = None
        self._stuck_after_s = stuck_after_s
        self._balancer = Balancer()
        self._replicas: list[Replica] = []
        self._request_ended = asyncio.Event()
        self._folder = SocketFolder()
        self._context = zmq.asyncio.Context()
        self._events = EventReceiver(self._context, self._folder.events)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        factory: str = FACTORY,
        on_progress: Callable[[Progress], None] | None = None,
        stuck_after_s: float = 60.0,
    ) -> EngineClient:
        """Launches ``config.parallel.data_parallel_size`` engines and waits until all can serve.

        Args:
          config: the settings of every engine.
          factory: builds an engine in its process, as ``module:function``.
          on_progress: called with every progress report of the start-up.
          stuck_after_s: `check_health` fails if an engine sends nothing for this many seconds.

        Raises:
          ConfigError, CheckpointError, UnsupportedModelError: the factory raised it; the user can
            fix the cause.
          EngineDeadError: an engine failed or died. Its traceback, if it sent one, is in the log.
        """
        client = cls(stuck_after_s=stuck_after_s)
        try:
            await client._launch(config, factory, on_progress)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def engines(self) -> Mapping[int, Ready]:
        """The resolved settings of each engine, by its index."""
        return {i: replica.ready.result() for i, replica in enumerate(self._replicas)}

    @property
    def ready(self) -> Ready:
        """The resolved settings of the first engine."""
        return self._replicas[0].ready.result()

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The latest state of each engine, by its index. A dead engine has no requests."""
        return {i: replica.stats for i, replica in enumerate(self._replicas)}

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight on all engines."""
        return sum(len(replica.in_flight) for replica in self._replicas)

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`. Sends the request to the engine with the lowest load score."""
        replica = self._pick(request.request_id)
        stream = replica.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            if replica.in_flight.get(request.request_id) is stream:
                replica.abort([request.request_id])

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for replica in self._replicas:
            _abort(replica, [i for i in request_ids if i in replica.in_flight])

    def check_health(self) -> None:
        """Raises EngineDeadError if an engine is dead or stuck."""
        for replica in self._replicas:
            replica.check_health(stuck_after_s=self._stuck_after_s)

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
        for replica in self._replicas:
            _abort(replica, list(replica.in_flight))

    async def close(self, *, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Stops the engines and removes the sockets. Requests in flight fail with EngineDeadError.

        An engine that can serve has ``timeout_s`` seconds to end its step. Idempotent, even during
        another call. Cancelling the call does not stop the closing.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(timeout_s))
        await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        error = EngineDeadError("the engines have been shut down")
        await asyncio.gather(
            *(replica.stop(error, timeout_s=timeout_s) for replica in self._replicas)
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._events.close()
        self._context.term()
        self._folder.remove()

    async def _launch(
        self,
        config: EngineConfig,
        factory: str,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        for engine in range(config.parallel.data_parallel_size):
            launch = Launch(
                engine=engine,
                factory=factory,
                requests_address=self._folder.requests(engine),
                events_address=self._folder.events,
                config=config,
                log_level=logger.getEffectiveLevel(),
            )
            self._replicas.append(Replica(EngineProcess(launch), self._request_ended))
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]
        self._tasks.append(asyncio.create_task(self._listen(on_progress)))
        await asyncio.gather(*(replica.ready for replica in self._replicas))

    def _pick(self, request_id: str) -> Replica:
        alive = {i: r for i, r in enumerate(self._replicas) if r.error is None}
        if not alive:
            raise EngineDeadError(str(self._replicas[0].error))
        if any(request_id in replica.in_flight for replica in alive.values()):
            raise InvalidRequestError(
                f"the request ID {request_id!r} is in use by a request in flight",
                param="request_id",
            )
        return alive[self._balancer.pick({i: replica.load for i, replica in alive.items()})]

    async def _watch(self, replica: Replica) -> None:
        """Marks a replica as dead when its process ends, for whatever reason."""
        exit_code = await replica.process.wait()
        if exit_code == FAILED_EXIT_CODE:  # EngineFailed may still be in the socket
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.failed.wait(), EXIT_REASON_TIMEOUT_S)
        self._on_engine_death(replica, EngineDeadError(_exit_message(replica, exit_code)))

    async def _listen(self, on_progress: Callable[[Progress], None] | None) -> None:
        """Handles the events of all engines, for as long as the client lives."""
        try:
            while True:
                # Takes all queued events at once, so that a slow reader gets one merged output.
                for event in await self._events.receive():
                    self._handle_event(event, on_progress)
                # Lets the readers run even if the next event has already arrived.
                await asyncio.sleep(0)
        except Exception as error:
            # Without this task, no output arrives any more: fail all requests instead of hanging.
            logger.exception("the engine client failed")
            for replica in self._replicas:
                replica.fail(EngineDeadError(f"the engine client failed: {error}"))

    def _handle_event(
        self, event: EngineEvent, on_progress: Callable[[Progress], None] | None
    ) -> None:
        replica = self._replicas[event.engine]
        if replica.error is not None:  # sent before the engine died or was stopped
            return
        match event:
            case StepOutputs():
                self._observe(event)
                replica.handle_outputs(event)
            case Progress():
                if on_progress is not None:
                    on_progress(event)
            case Ready():
                address = self._folder.requests(event.engine)
                replica.set_ready(event, RequestSender(self._context, address))
            case EngineFailed():
                if not event.is_user_error:
                    logger.error("engine %d failed:\n%s", event.engine, event.traceback)
                self._on_engine_death(replica, _reported_error(event))

    def _observe(self, event: StepOutputs) -> None:
        if self.on_outputs is not None:
            try:
                self.on_outputs(event)
            except Exception:
                logger.exception("the on_outputs callback failed")

    def _on_engine_death(self, replica: Replica, error: JaxserveError) -> None:
        """Fails the requests of an engine that ended although nobody stopped it."""
        if replica.error is None:
            if replica.ready.done():
                logger.error("%s; failed requests in flight: %d", error, len(replica.in_flight))
            replica.fail(error)


def _abort(replica: Replica, request_ids: list[str]) -> None:
    """Aborts requests, and ends their streams with reason ABORT."""
    if not request_ids:
        return
    streams = {i: replica.in_flight[i] for i in request_ids}
    replica.abort(request_ids)
    for request_id, stream in streams.items():
        stream.push(RequestOutput(request_id, [], FinishReason.ABORT))


def _reported_error(failed: EngineFailed) -> JaxserveError:
    """Returns the error that an engine reported, with its original type if a user can fix it."""
    if not failed.is_user_error:
        return EngineDeadError(f"engine {failed.engine} failed: {failed.message}")
    return STARTUP_ERRORS.get(failed.error_type, JaxserveError)(failed.message)


def _exit_message(replica: Replica, exit_code: int) -> str:
    """Describes the end of an engine process that reported no error."""
    engine = f"engine {replica.process.engine} (pid {replica.process.pid})"
    if exit_code >= 0:
        return f"{engine} ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"{engine} was killed by {name}{hint}"

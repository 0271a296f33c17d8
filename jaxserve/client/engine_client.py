"""The front's side of the engines: starts them, spreads requests over them, hears from them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import zmq.asyncio

from jaxserve import errors
from jaxserve.client.balance import Balancer
from jaxserve.client.launcher import EngineProcess
from jaxserve.client.replica import Replica
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError
from jaxserve.ipc.launch import FAILED_EXIT_CODE, Launch
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

FACTORY = "jaxserve.engine.factory:build"
"""What builds an engine in its process: ``module:function``."""

SHUTDOWN_TIMEOUT_S = 5.0
"""How long an engine may take to leave when told so: a step in flight has to end first."""

LAST_WORDS_TIMEOUT_S = 2.0
"""How long to wait for the reason after an engine has failed."""


class EngineClient:
    """Engines in processes of their own, behind the `Engine` protocol.

    Everything runs on the asyncio loop on which `start` was called.

    Attributes:
      on_outputs: called with every message of every engine, before its outputs are handed out; for
        metrics. It must not keep the outputs. What it raises is logged.
    """

    def __init__(self, *, stuck_after_s: float = 60.0) -> None:
        """Use `start`, which also launches the engines."""
        self.on_outputs: Callable[[StepOutputs], None] | None = None
        self._stuck_after_s = stuck_after_s
        self._balancer = Balancer()
        self._replicas: list[Replica] = []
        self._departed = asyncio.Event()
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
          config: what every engine is told.
          factory: ``module:function`` that builds an engine, in its process.
          on_progress: called with every report of start-up work.
          stuck_after_s: an engine with requests on board that is silent for so many seconds is ill.

        Raises:
          ConfigError, CheckpointError...: what a factory raised, if a user can mend it.
          EngineDeadError: an engine failed or died; if it left a traceback, that has been logged.
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
        """What each engine settled on, by its index."""
        return {i: replica.ready.result() for i, replica in enumerate(self._replicas)}

    @property
    def ready(self) -> Ready:
        """What the first engine settled on."""
        return self._replicas[0].ready.result()

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The newest state of each engine, by its index. A dead one holds nothing."""
        return {i: replica.stats for i, replica in enumerate(self._replicas)}

    @property
    def num_in_flight(self) -> int:
        """Requests on board of all engines."""
        return sum(len(replica.in_flight) for replica in self._replicas)

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`. The request goes to the engine with the smallest score."""
        replica = self._pick(request.request_id)
        on_board = replica.submit(request)
        try:
            async for output in on_board.stream:
                yield output
        finally:
            if replica.in_flight.get(request.request_id) is on_board:
                replica.abort([request.request_id])

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for replica in self._replicas:
            _abort(replica, [i for i in request_ids if i in replica.in_flight])

    def check_health(self) -> None:
        """Raises EngineDeadError if an engine is dead, or does not move."""
        for replica in self._replicas:
            replica.check_health(stuck_after_s=self._stuck_after_s)

    async def drain(self, timeout_s: float) -> None:
        """Waits until no request is on board, ``timeout_s`` seconds at most; aborts the rest.

        The readers of the aborted ones get a last output that says so. Refusing new requests in
        the meantime is the caller's business.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_in_flight:
                    self._departed.clear()
                    await self._departed.wait()
        for replica in self._replicas:
            _abort(replica, list(replica.in_flight))

    async def close(self) -> None:
        """Ends the engines and removes the sockets. Requests on board fail with EngineDeadError.

        May be called again, also while another call is in flight; goes on if that is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        error = EngineDeadError("the engines have been shut down")
        await asyncio.gather(
            *(replica.stop(error, timeout_s=SHUTDOWN_TIMEOUT_S) for replica in self._replicas)
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
            )
            self._replicas.append(Replica(EngineProcess(launch), self._departed))
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]
        self._tasks.append(asyncio.create_task(self._listen(on_progress)))
        await asyncio.gather(*(replica.ready for replica in self._replicas))

    def _pick(self, request_id: str) -> Replica:
        alive = {i: r for i, r in enumerate(self._replicas) if r.error is None}
        if not alive:
            raise EngineDeadError(str(self._replicas[0].error))
        if any(request_id in replica.in_flight for replica in alive.values()):
            raise InvalidRequestError(
                f"the request id {request_id!r} is in use by a request in flight",
                param="request_id",
            )
        return alive[self._balancer.pick({i: replica.load for i, replica in alive.items()})]

    async def _watch(self, replica: Replica) -> None:
        """Notices the end of an engine's process, however it comes."""
        exit_code = await replica.process.wait()
        if exit_code == FAILED_EXIT_CODE:  # the reason may still be on its way
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.died.wait(), LAST_WORDS_TIMEOUT_S)
        self._lose(replica, EngineDeadError(_obituary(replica, exit_code)))

    async def _listen(self, on_progress: Callable[[Progress], None] | None) -> None:
        """Acts on what the engines say."""
        try:
            while True:
                # Of a front that is behind, readers get what has come in one: it catches up.
                for event in await self._events.receive():
                    self._hear(event, on_progress)
                # A turn for the readers, even if the next message is there already.
                await asyncio.sleep(0)
        except Exception as error:
            # Nobody would hear from an engine any more: better to fail than to hang.
            logger.exception("the engine client failed")
            for replica in self._replicas:
                replica.die(EngineDeadError(f"the engine client failed: {error}"))

    def _hear(self, event: EngineEvent, on_progress: Callable[[Progress], None] | None) -> None:
        replica = self._replicas[event.engine]
        if replica.error is not None:  # sent before it died, or was told to leave
            return
        match event:
            case StepOutputs():
                self._observe(event)
                replica.take(event)
            case Progress():
                if on_progress is not None:
                    on_progress(event)
            case Ready():
                address = self._folder.requests(event.engine)
                replica.serve(event, RequestSender(self._context, address))
            case EngineFailed():
                if not event.is_user_error:
                    logger.error("engine %d failed:\n%s", event.engine, event.traceback)
                self._lose(replica, _cause(event))

    def _observe(self, event: StepOutputs) -> None:
        if self.on_outputs is not None:
            try:
                self.on_outputs(event)
            except Exception:
                logger.exception("an observer of the engines' outputs failed")

    def _lose(self, replica: Replica, error: JaxserveError) -> None:
        """An engine is gone, without having been told to leave.

        Its requests fail. To run them on another engine instead, this is the place, and an
        `InFlight` has what it takes.
        """
        if replica.error is None:
            if replica.ready.done():
                logger.error("%s; requests on board that fail: %d", error, len(replica.in_flight))
            replica.die(error)


def _abort(replica: Replica, request_ids: list[str]) -> None:
    """Takes requests off an engine, and tells their readers."""
    if not request_ids:
        return
    streams = {i: replica.in_flight[i].stream for i in request_ids}
    replica.abort(request_ids)
    for request_id, stream in streams.items():
        stream.push(RequestOutput(request_id, [], FinishReason.ABORT))


def _cause(failed: EngineFailed) -> JaxserveError:
    """The error that an engine ended with, as it was raised there if a user can mend it."""
    if not failed.is_user_error:
        return EngineDeadError(f"engine {failed.engine} failed: {failed.message}")
    error_type = getattr(errors, failed.error_type, JaxserveError)
    return error_type(failed.message)


def _obituary(replica: Replica, exit_code: int) -> str:
    """What to say of an engine that has ended and left no reason."""
    who = f"engine {replica.process.engine} (pid {replica.process.pid})"
    if exit_code >= 0:
        return f"{who} ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"{who} was killed by {name}{hint}"

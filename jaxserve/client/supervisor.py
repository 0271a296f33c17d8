"""Keeps the engines running: starts their processes, and starts them again when they die."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable

import msgspec
import zmq.asyncio

from jaxserve.client.engines import Callbacks
from jaxserve.client.owned_engine import OwnedEngine, Silence
from jaxserve.client.recovery import Restarts
from jaxserve.client.replica import Observers, Replica
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.control import EngineDown, EnginesGone, EngineUp
from jaxserve.ipc.launch import Launch
from jaxserve.ipc.messages import Progress, Ready, RemoveReader, StepOutputs, StepStats
from jaxserve.ipc.socket_folder import SocketFolder, remove_socket

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs the engine processes of this process, and owns their sockets. Implements `Engines`.

        replica dies ──> death ──> wait, longer each time ──> new replica ──> ready ─┐
             ^───────────────────────────────────────────────────────────────────────┘

    The main process of a server with several fronts has a supervisor, and no requests of its own.
    It sends its fronts, which use `AttachedEngines`, the messages that `engine_up`, `engine_down`
    and `state_for` return.

    Args:
      config: the settings of every engine.
      factory: builds an engine in its process, as ``module:function``.
      stuck_after_s: see `EngineClient.start`.
      on_progress: called with every progress report of a start-up.

    Attributes:
      folder: the folder of the sockets.
      replicas: see `Engines`.
      readies: see `Engines`.
      gone: see `Engines`.
    """

    reader = 0

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        *,
        stuck_after_s: float = 60.0,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Creates the folder only. Needs a running event loop."""
        self.folder = SocketFolder()
        self.replicas: dict[int, Replica] = {}
        self.readies: dict[int, Ready] = {}
        self.gone: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._factory = factory
        timeout_s = config.recovery.engine_timeout
        self._silence = Silence(suspect_s=min(stuck_after_s, timeout_s), dead_s=timeout_s)
        self._observers = Observers(self._on_outputs, on_progress)
        self._callbacks = Callbacks()
        self._owned: dict[int, OwnedEngine] = {}
        self._announced: dict[int, Replica] = {}  # by engine: the last one that was ready
        self._down: set[int] = set()  # the engines whose announced replica is dead
        self._num_retired = 0
        self._launches = itertools.count()
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self, callbacks: Callbacks) -> None:
        """See `Engines.watch`."""
        self._callbacks = callbacks

    async def start(self) -> None:
        """Starts all engines, and waits until all can serve.

        Raises:
          JaxserveError: an engine cannot start. Call `stop` then.
        """
        for engine in range(self._config.parallel.data_parallel_size):
            self._start(engine)
        readies = await asyncio.gather(*(replica.ready for replica in self.replicas.values()))
        self.readies = {ready.engine: ready for ready in readies}
        for engine in self.readies:
            task = asyncio.create_task(self._keep_running(engine))
            task.add_done_callback(self._on_supervision_ended)
            self._tasks.append(task)

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Ends all processes and removes the sockets; see `Engines.stop`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stopping = [owned.stop(error, timeout_s=timeout_s) for owned in self._owned.values()]
        await asyncio.gather(*stopping)
        self._context.destroy(linger=0)  # a socket that is open would stop it for ever
        self.folder.remove()

    def engine_up(self, replica: Replica, reader: int) -> EngineUp:
        """Returns the message that tells a front, which is ``reader``, of an engine process."""
        process = replica.link.process
        return EngineUp(
            process,
            replica.link.requests_address,
            self.folder.events(process, reader),
            replica.ready.result(),
            replica.stats_before or StepStats(),
        )

    def engine_down(self, replica: Replica) -> EngineDown:
        """Returns the message that tells fronts that an engine process is dead."""
        death = replica.death.result()
        ids = None if death.running_ids is None else sorted(death.running_ids)
        return EngineDown(replica.link.process, str(death.error), ids)

    def state_for(self, reader: int) -> list[EngineUp | EngineDown | EnginesGone]:
        """Returns the messages that a new front, which is ``reader``, receives first.

        They say what the callbacks have said so far. Of an engine that is down the front learns its
        settings and its totals.
        """
        messages: list[EngineUp | EngineDown | EnginesGone] = []
        for engine, replica in self._announced.items():
            up = self.engine_up(replica, reader)
            if engine in self._down:
                up = msgspec.structs.replace(up, stats=replica.stats)
                # The front has no requests yet, so none of its own was running.
                down = msgspec.structs.replace(self.engine_down(replica), running_ids=[])
                messages += [up, down]
            else:
                messages.append(up)
        if self.gone.done():
            messages.append(EnginesGone(str(self.gone.result())))
        return messages

    def remove_reader(self, reader: int) -> None:
        """Tells all engines that a front, which was ``reader``, has ended. Idempotent."""
        for replica in self.replicas.values():
            replica.send(RemoveReader(reader))
            remove_socket(self.folder.events(replica.link.process, reader))

    def _start(self, engine: int) -> OwnedEngine:
        """Starts a process for an engine: the first one, or one that replaces the last.

        Raises:
          ConfigError, EngineDeadError: see `OwnedEngine` and `SocketFolder`.
        """
        self.folder.renew()
        number = next(self._launches)
        first = self.readies.get(engine)
        launch = Launch(
            engine=engine,
            factory=self._factory,
            requests_address=self.folder.requests(number),
            events_address=self.folder.events(number, self.reader),
            config=self._config if first is None else _with_sizes(self._config, first),
            fingerprint="" if first is None else first.fingerprint,
            log_level=logger.getEffectiveLevel(),
        )
        before = self.replicas.get(engine)
        owned = OwnedEngine(
            launch, number, self._context, self._observers, self._silence, before=before
        )
        self._owned[engine], self.replicas[engine] = owned, owned.replica
        return owned

    async def _keep_running(self, engine: int) -> None:
        """Restarts an engine whenever it dies, until its restarts are used up."""
        restarts = Restarts(self._config.recovery.max_engine_restarts)
        error, served_s = await self._until_death(self._owned[engine])
        while (delay_s := restarts.next_delay_s(served_s)) is not None:
            logger.error("%s; %s in %.0f s", error, restarts.describe(), delay_s)
            await asyncio.sleep(delay_s)
            try:
                owned = self._start(engine)
            except JaxserveError as failure:
                error, served_s = failure, 0.0
            else:
                error, served_s = await self._until_death(owned)
        logger.error("%s; the restarts of engine %d are used up", error, engine)
        self._num_retired += 1
        if self._num_retired == len(self.replicas):
            self.gone.set_result(EngineDeadError(str(error)))

    def _on_supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Gives up all engines after a defect, since requests could wait for ever."""
        if not task.cancelled() and task.exception() is not None and not self.gone.done():
            logger.error("the supervision of an engine failed", exc_info=task.exception())
            error = f"the supervision of an engine failed: {task.exception()}"
            self.gone.set_result(EngineDeadError(error))

    async def _until_death(self, owned: OwnedEngine) -> tuple[Exception, float]:
        """Waits until an engine is dead and its process has ended.

        Returns the reason, and how many seconds the engine had served.
        """
        replica = owned.replica
        await asyncio.wait([replica.ready])
        if replica.was_ready:
            self._announced[replica.engine] = replica
            self._down.discard(replica.engine)
            self._callbacks.ready(replica)
        death = await asyncio.shield(replica.death)
        served_s = replica.served_s
        if replica.was_ready:
            self._down.add(replica.engine)
            self._callbacks.death(replica)
        await owned.remove()
        return death.error, served_s

    def _on_outputs(self, event: StepOutputs) -> None:
        self._callbacks.outputs(event)


def _with_sizes(config: EngineConfig, ready: Ready) -> EngineConfig:
    """Returns the config for restarts, which gives the engine the sizes that it had before.

    Otherwise it could measure less free memory, and refuse requests that it had accepted.
    """
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=ready.max_model_len),
        cache=dataclasses.replace(config.cache, num_blocks=ready.num_blocks),
        scheduler=dataclasses.replace(
            config.scheduler,
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
        ),
    )

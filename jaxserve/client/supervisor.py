"""Keeps the engines running: starts their processes, and starts them again when they die."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable

import zmq.asyncio

from jaxserve.client.recovery import Restarts
from jaxserve.client.replica import Observers, Replica, Silence
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.launch import Launch
from jaxserve.ipc.messages import Ready
from jaxserve.ipc.transport import SocketFolder

logger = logging.getLogger(__name__)


class Supervisor:
    """The engine processes of a front, and their sockets.

        replica dies ──> on_death ──> wait, longer each time ──> new replica ──> on_ready ─┐
             ^─────────────────────────────────────────────────────────────────────────────┘

    Args:
      config: the settings of every engine.
      factory: builds an engine in its process, as ``module:function``.
      observers: see `Replica`.
      silence: see `Replica`.
      on_ready: called when a replica that replaces a dead one can serve.
      on_death: called when a replica is dead. It takes the requests of the replica.

    Attributes:
      replicas: the current replica of each engine, by its index.
      gone: set, with the reason, when no engine is left and none will be restarted.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        observers: Observers,
        silence: Silence,
        *,
        on_ready: Callable[[], None],
        on_death: Callable[[Replica], None],
    ) -> None:
        self.replicas: list[Replica] = []
        self.gone: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._factory = factory
        self._observers = observers
        self._silence = silence
        self._on_ready = on_ready
        self._on_death = on_death
        self._num_retired = 0
        self._folder = SocketFolder()
        self._launches = itertools.count()
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> list[Ready]:
        """Starts all engines, and returns their resolved settings once all can serve.

        Raises:
          JaxserveError: an engine cannot start.
        """
        for engine in range(self._config.parallel.data_parallel_size):
            self.replicas.append(self._new_replica(self._launch(engine)))
        readies = await asyncio.gather(*(replica.ready for replica in self.replicas))
        for ready in readies:
            task = asyncio.create_task(self._keep_running(ready))
            task.add_done_callback(self._on_supervision_ended)
            self._tasks.append(task)
        return readies

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Ends all processes and removes the sockets.

        ``error`` is the reason of their death. See `Replica.stop` for ``timeout_s``.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stopping = [r.stop(error, timeout_s=timeout_s) for r in self.replicas]
        await asyncio.gather(*stopping)
        self._context.term()
        self._folder.remove()

    def _launch(self, engine: int, first: Ready | None = None) -> Launch:
        """Returns the settings of a new process; for a restart, those of the ``first`` start."""
        number = next(self._launches)
        return Launch(
            engine=engine,
            factory=self._factory,
            requests_address=self._folder.requests(number),
            events_address=self._folder.events(number),
            config=self._config if first is None else _with_sizes(self._config, first),
            fingerprint="" if first is None else first.fingerprint,
            log_level=logger.getEffectiveLevel(),
        )

    def _new_replica(self, launch: Launch, before: Replica | None = None) -> Replica:
        return Replica(launch, self._context, self._observers, self._silence, before=before)

    async def _keep_running(self, ready: Ready) -> None:
        """Restarts an engine whenever it dies, until its restarts are used up.

        ``ready`` has the settings with which it started first.
        """
        engine = ready.engine
        restarts = Restarts(self._config.recovery.max_engine_restarts)
        error, served_s = await self._until_death(self.replicas[engine])
        while (delay_s := restarts.next_delay_s(served_s)) is not None:
            logger.error("%s; %s in %.0f s", error, restarts.describe(), delay_s)
            await asyncio.sleep(delay_s)
            try:
                launch = self._launch(engine, ready)
                replica = self._new_replica(launch, self.replicas[engine])
            except (OSError, JaxserveError) as failure:
                error, served_s = failure, 0.0
            else:
                self.replicas[engine] = replica
                error, served_s = await self._until_death(replica)
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

    async def _until_death(self, replica: Replica) -> tuple[Exception, float]:
        """Waits until an engine is dead and its process has ended.

        Returns the reason, and how many seconds the engine had served.
        """
        await asyncio.wait([replica.ready])
        self._on_ready()
        death = await asyncio.shield(replica.death)
        served_s = replica.served_s
        self._on_death(replica)
        await replica.remove()
        return death.error, served_s


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

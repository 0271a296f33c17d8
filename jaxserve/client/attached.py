"""The engines of a server as one of several fronts uses them: another process runs them."""

from __future__ import annotations

import asyncio
import logging

import zmq.asyncio

from jaxserve.client.death import Death
from jaxserve.client.engines import Callbacks
from jaxserve.client.link import Link
from jaxserve.client.replica import Observers, Replica
from jaxserve.client.totals import latest
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, EngineDeadError, JaxserveError
from jaxserve.ipc.control import EngineDown, EnginesGone, EngineUp
from jaxserve.ipc.messages import Ready, RemoveReader, StepOutputs, StepStats
from jaxserve.ipc.wire_ids import own_ids

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds that the last request may take to reach an engine, when the front stops."""


class AttachedEngines:
    """Implements `Engines` for a front whose main process runs the engines.

        main process ── EngineUp, EngineDown, EnginesGone ──> handle
                                                                │ one Replica for each EngineUp
        engine processes <── AddReader, requests; events ──>  replicas

    Args:
      config: the settings of every engine.
      reader: the number of this front as a reader, from 1. Every start of a front has a new one.
      stuck_after_s: see `EngineClient.start`. Only the main process kills an engine.

    Attributes:
      gone: see `Engines`. Also done if this front can no longer receive the events of an engine
        that is alive; then the front has to end.
    """

    def __init__(self, config: EngineConfig, *, reader: int, stuck_after_s: float = 60.0) -> None:
        """Waits for messages to `handle`. Needs a running event loop."""
        assert reader > 0, "reader 0 runs the engines"
        self.reader = reader
        self.replicas: dict[int, Replica] = {}
        self.readies: dict[int, Ready] = {}
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[EngineDeadError] = loop.create_future()
        self._num_engines = config.parallel.data_parallel_size
        self._suspect_s = min(stuck_after_s, config.recovery.engine_timeout)
        self._callbacks = Callbacks()
        self._context = zmq.asyncio.Context()
        self._running: dict[int, Replica] = {}  # by number of the process
        self._all_ready = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def watch(self, callbacks: Callbacks) -> None:
        """See `Engines.watch`."""
        self._callbacks = callbacks

    def handle(self, message: EngineUp | EngineDown | EnginesGone) -> None:
        """Handles a message of the main process; call it in the order in which they arrive."""
        match message:
            case EngineUp():
                self._add(message)
            case EngineDown():
                self._remove(message)
            case EnginesGone(message=reason):
                self._give_up(EngineDeadError(reason))

    async def all_ready(self) -> None:
        """Waits until every engine has been ready once.

        Raises:
          EngineDeadError: the engines are gone.
        """
        waiting = asyncio.create_task(self._all_ready.wait())
        try:
            await asyncio.wait([waiting, self.gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.gone.done():
            raise self.gone.result()

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """See `Engines.stop`. The engines abort the requests of this front, and run on."""
        running, self._running = list(self._running.values()), {}
        for replica in running:
            sender = replica.retire(error, RemoveReader(self.reader))
            if sender is not None:
                sender.close(linger_s=min(timeout_s, LINGER_S))
        closing = [*self._closing, *(replica.close() for replica in running)]
        await asyncio.gather(*closing)
        # Waits until the last requests are sent, so it must not stop the loop.
        await asyncio.to_thread(self._context.term)

    def _add(self, up: EngineUp) -> None:
        """Connects to an engine process, which replaces a dead one of the same engine."""
        engine = up.ready.engine
        before = self.replicas.get(engine)
        stats = up.stats
        if before is not None:
            assert before.death.done(), f"engine {engine} is up twice"
            # Each process may have read a later state of the dead one than the others. So totals
            # that were shown here never go back, but fronts may differ by the tokens of one step.
            stats = latest(stats, before.stats)
        link = Link(engine, up.process, self.reader, up.requests_address, up.events_address)
        try:
            replica = self._connected(link, up.ready, None if stats == StepStats() else stats)
        except ConfigError as failure:
            self._give_up(EngineDeadError(str(failure)))
            return
        replica.death.add_done_callback(lambda _: self._on_death(replica))
        self.replicas[engine] = self._running[up.process] = replica
        self.readies.setdefault(engine, up.ready)
        if len(self.readies) == self._num_engines:
            self._all_ready.set()
        self._callbacks.ready(replica)

    def _connected(self, link: Link, ready: Ready, stats_before: StepStats | None) -> Replica:
        """Returns a replica of a process that can serve. Raises ConfigError if sockets fail."""
        replica = Replica(
            link,
            self._context,
            Observers(self._on_outputs),
            suspect_s=self._suspect_s,
            stats_before=stats_before,
        )
        try:
            replica.connect(ready)
        except ConfigError:
            replica.abandon()
            raise
        return replica

    def _remove(self, down: EngineDown) -> None:
        """Gives the requests of a dead engine process away."""
        replica = self._running.pop(down.process, None)
        if replica is None:  # this front could not connect to it, and has given up
            assert self.gone.done(), f"process {down.process} was never up"
            return
        ids = None if down.running_ids is None else own_ids(self.reader, down.running_ids)
        replica.die(Death(EngineDeadError(down.message), ids))
        self._callbacks.death(replica)
        closing = asyncio.create_task(replica.close())
        self._closing.add(closing)
        closing.add_done_callback(self._on_closed)

    def _on_closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and closing.exception() is not None:
            logger.error("the end of an engine's sockets failed", exc_info=closing.exception())

    def _on_outputs(self, event: StepOutputs) -> None:
        self._callbacks.outputs(event)

    def _on_death(self, replica: Replica) -> None:
        """Notices that the replica of a running engine has failed here."""
        if replica.link.process in self._running:
            self._give_up(EngineDeadError(str(replica.death.result().error)))

    def _give_up(self, error: EngineDeadError) -> None:
        if not self.gone.done():
            self.gone.set_result(error)

"""The main process of a server with several fronts.

    client ── TCP ──> main process: accepts, and hands each connection to a front (`server.fronts`)
                        │ starts, watches and restarts the engines and the fronts
                        │ `ipc.control`: which engines there are; when to stop
                      front processes (`server.front`) <── `ipc.messages` ──> engine processes

It has no part in requests: a front sends them to the engines itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from jaxserve.client.engine_client import SHUTDOWN_TIMEOUT_S
from jaxserve.client.engines import Callbacks
from jaxserve.client.replica import Replica
from jaxserve.client.supervisor import Supervisor
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.front.counts import IN_FLIGHT
from jaxserve.front.metrics import StepMetrics
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.ipc.control import EnginesGone, FrontUp, Phase, ToFront
from jaxserve.ipc.control_channel import ControlAddresses
from jaxserve.ipc.messages import Progress, StepStats
from jaxserve.program.stops import Stops
from server.front_process import FrontProcess
from server.fronts import Fronts
from server.launch import FrontLaunch
from server.settings import FrontSettings

logger = logging.getLogger(__name__)

FRONT_END_S = 10.0
"""Seconds that a front has to end once its requests have no more time. One that works takes a few:
clients read their last bytes, and its sockets send theirs."""


class MainProcess:
    """Implements `server.service.Service` with ``--api-server-count`` front processes.

    Args:
      settings: the settings of every front.
      listeners: the sockets that listen.
      on_progress: called with every progress report of an engine that starts.
    """

    def __init__(
        self,
        settings: FrontSettings,
        listeners: Sequence[socket.socket],
        on_progress: Callable[[Progress], None],
    ) -> None:
        """Creates sockets and shared memory. Needs a running event loop."""
        config, server = settings.config, settings.server
        self._settings = dataclasses.replace(
            settings, api=settings.api.share(server.api_server_count)
        )
        self._phase = Phase("starting")
        self._on_progress = on_progress
        self._supervisor = Supervisor(
            config, server.engine_factory, on_progress=self._observe_progress
        )
        self._counts = SharedCounts.create(
            num_fronts=server.api_server_count, num_engines=config.parallel.data_parallel_size
        )
        self._supervisor.watch(
            Callbacks(
                outputs=StepMetrics(self._counts.own).step_done,
                ready=self._on_engine_ready,
                death=self._on_engine_death,
            )
        )
        self._supervisor.gone.add_done_callback(self._on_engines_gone)
        self._fronts = Fronts(
            server.api_server_count,
            listeners,
            launch=self._launch,
            on_begin=self._news_for,
            on_end=self._on_front_ended,
            max_restarts=config.recovery.max_engine_restarts,
        )

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """See `Service.stats`."""
        return {engine: replica.stats for engine, replica in self._supervisor.replicas.items()}

    @property
    def num_in_flight(self) -> int:
        """See `Service.num_in_flight`."""
        return int(self._counts.total(IN_FLIGHT))

    @property
    def error(self) -> JaxserveError | None:
        """See `Service.error`: no engine or no front is left."""
        gone = (self._supervisor.gone, self._fronts.gone)
        return next((each.result() for each in gone if each.done()), None)

    async def start(self) -> FrontUp:
        """See `Service.start`."""
        fronts = asyncio.create_task(self._fronts.start())
        starts = {fronts, asyncio.create_task(self._supervisor.start())}
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in done:
                start.result()
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        return fronts.result()

    def ends(self) -> list[asyncio.Future]:
        """See `Service.ends`."""
        if self._settings.server.keep_running:
            return [self._fronts.gone]
        return [self._fronts.gone, self._supervisor.gone]

    def refuse(self, stops: Stops) -> None:
        """See `Service.refuse`. The fronts begin to drain."""
        self._fronts.stop(stops.haste)
        for decision in (stops.limited, stops.at_once):
            decision.add_done_callback(lambda _: self._fronts.stop(stops.haste))

    async def drain(self, stops: Stops) -> None:
        """See `Service.drain`. The fronts end when they have drained; `close` kills the rest."""
        ended = asyncio.create_task(self._fronts.ended())
        await stops.give_time(ended, self._settings.server.shutdown_timeout)
        await asyncio.wait([ended], timeout=FRONT_END_S)
        ended.cancel()

    async def close(self, *, at_once: bool) -> None:
        """See `Service.close`."""
        await self._fronts.close()
        error = EngineDeadError("the engines have been shut down")
        await self._supervisor.stop(error, timeout_s=0 if at_once else SHUTDOWN_TIMEOUT_S)
        self._counts.close()

    def _launch(self, index: int, reader: int) -> FrontLaunch:
        """Returns the settings of a new front process. Raises ConfigError; see `SocketFolder`."""
        self._supervisor.folder.renew()
        return FrontLaunch(
            index=index,
            reader=reader,
            control=ControlAddresses.of(self._supervisor.folder, reader),
            counts_fd=self._counts.fileno(),
            settings=self._settings,
            log_level=logger.getEffectiveLevel(),
        )

    def _news_for(self, reader: int) -> list[ToFront]:
        """Returns what a new front has to be told first."""
        return [self._phase, *self._supervisor.state_for(reader)]

    def _observe_progress(self, event: Progress) -> None:
        self._on_progress(event)
        if event.phase != self._phase.name:
            self._phase = Phase(event.phase)
            self._fronts.send(lambda _: self._phase)

    def _on_engine_ready(self, replica: Replica) -> None:
        self._fronts.send(lambda reader: self._supervisor.engine_up(replica, reader))

    def _on_engine_death(self, replica: Replica) -> None:
        self._fronts.send(lambda _: self._supervisor.engine_down(replica))

    def _on_engines_gone(self, gone: asyncio.Future[EngineDeadError]) -> None:
        self._fronts.send(lambda _: EnginesGone(str(gone.result())))

    def _on_front_ended(self, front: FrontProcess) -> None:
        self._supervisor.remove_reader(front.launch.reader)
        self._counts.clear_gauges(front.launch.index)

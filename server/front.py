"""A front process: ``python -m server.front``, started by `server.front_process`.

It serves the connections that the main process hands to it, and sends requests to the engines
itself. It has the same parts as a server with one front; the main process tells it which engines
there are and when to stop. It exits at once when the main process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvloop
import zmq.asyncio

from jaxserve.client.attached import AttachedEngines
from jaxserve.client.engine_client import EngineClient
from jaxserve.errors import JaxserveError
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.ipc.control import Aborted, AbortRequests, Alive, FrontFailed, Phase, Stop
from jaxserve.ipc.control_channel import ControlChannel
from jaxserve.ipc.launch import FAILED_EXIT_CODE
from jaxserve.ipc.parent import begin_child_process
from jaxserve.program.stops import Stops
from server.abort_calls import AbortCalls
from server.connections import ConnectionReceiver
from server.launch import FrontLaunch
from server.log import set_up_logging
from server.open_files import watch_open_files
from server.service import serve_until_stopped
from server.serving import Front
from server.tasks import Interrupted, background, unless_done

ALIVE_INTERVAL_S = 1.0

LINGER_S = 2.0
"""Seconds that the last message to the main process may take at exit."""


class FrontServer:
    """Serves in this process until the main process stops it.

    Args:
      launch: the settings.
    """

    def __init__(self, launch: FrontLaunch) -> None:
        """Needs a running event loop."""
        config = launch.settings.config
        self._launch = launch
        self._context = zmq.asyncio.Context()
        self._channel = ControlChannel.of_front(self._context, launch.control)
        self._connections = ConnectionReceiver(launch.connections_fd)
        self._aborts = AbortCalls(self._channel.send)
        self._stops = Stops()
        self._engines = AttachedEngines(config, reader=launch.reader)
        self._client = EngineClient(self._engines, config)
        counts = SharedCounts.attach(
            launch.counts_fd,
            index=launch.index,
            num_fronts=launch.settings.server.api_server_count,
            num_engines=config.parallel.data_parallel_size,
        )
        self._front = Front(
            launch.settings, self._connect, counts=counts, fingerprint=launch.fingerprint
        )
        self._front.state.abort_elsewhere = self._aborts.abort

    async def run(self) -> int:
        """Serves until the end. Returns the exit code."""
        try:
            async with asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(self._take_connections())
                helpers = [tasks.create_task(each) for each in (self._obey(), self._send_alive())]
                with background(watch_open_files()):
                    exit_code = await self._serve(taking)
                for helper in helpers:
                    helper.cancel()
        finally:
            await self._client.close()
            self._connections.close()
            self._channel.close(linger_s=LINGER_S)
            self._context.term()
        return exit_code

    async def _serve(self, taking: asyncio.Task[None]) -> int:
        """Does what `server.run.serve` does for a server with one front; returns the exit code."""
        try:
            self._channel.send(await unless_done(self._stops.stop, self._front.start()))
            await serve_until_stopped(self._front, self._stops, on_stop=lambda: None)
        except Interrupted:
            return 0
        except JaxserveError as error:
            self._channel.send(FrontFailed(str(error), type(error).__name__))
            return FAILED_EXIT_CODE
        finally:
            taking.cancel()  # the main process hands further connections to other fronts
            await self._front.close(at_once=self._stops.at_once.done())
        return 0

    async def _connect(self) -> EngineClient:
        await self._engines.all_ready()
        return self._client

    async def _obey(self) -> None:
        """Does what the main process says."""
        while True:
            match message := await self._channel.receive():
                case Phase(name=name):
                    self._front.state.phase = name
                case Stop(haste=haste):
                    self._stops.decide(haste)
                case AbortRequests(call=call, request_id=request_id):
                    text_engine = self._front.state.text_engine
                    count = 0 if text_engine is None else text_engine.abort(request_id)
                    self._channel.send(Aborted(call, count))
                case Aborted():
                    self._aborts.handle(message)
                case _:
                    self._engines.handle(message)

    async def _take_connections(self) -> None:
        """Takes connections until the main process has ended; then this process ends, too."""
        await self._front.http.has_started.wait()
        self._channel.send(Alive())
        with contextlib.suppress(EOFError):
            while True:
                connection = await self._connections.receive()
                await self._front.http.adopt(connection)
                self._connections.taken()

    async def _send_alive(self) -> None:
        await self._front.http.has_started.wait()
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_S)
            self._channel.send(Alive())


def main() -> int:
    """Runs the front that the first line of the standard input describes; returns the exit code."""
    launch = begin_child_process(FrontLaunch)
    set_up_logging(launch.log_level, who=f"front {launch.index}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(launch))


async def _run(launch: FrontLaunch) -> int:
    return await FrontServer(launch).run()


if __name__ == "__main__":
    sys.exit(main())

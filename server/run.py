"""Runs a server process: listen, start the engines, serve, drain, exit."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.front.counts import LocalCounts
from jaxserve.front.metrics import StepMetrics, num_cells
from jaxserve.ipc.control import FrontUp
from jaxserve.ipc.messages import Progress
from jaxserve.program.signals import StopSignals
from server.console import Console
from server.listen import is_local, url_of
from server.main_process import MainProcess
from server.open_files import watch_open_files
from server.service import Service, serve_until_stopped
from server.serving import Front
from server.settings import ApiSettings, FrontSettings, ServerSettings
from server.tasks import Interrupted, background, unless_done
from server.throughput import log_throughput


class Stopped(Exception):
    """A signal stopped the process during the start. ``signal_number`` is its number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


async def serve(
    listeners: Sequence[socket.socket],
    config: EngineConfig,
    api: ApiSettings,
    settings: ServerSettings,
    console: Console,
) -> None:
    """Serves until a signal stops it; see `StopSignals`. Then the process should exit.

    Raises:
      Stopped: a signal arrived before the server was ready.
      EngineDeadError: no engine is left.
      JaxserveError: the server cannot start.
    """
    template = read_template(settings.chat_template)
    front = FrontSettings(config, api, settings, template, is_local(listeners), int(time.time()))
    with StopSignals() as signals, background(watch_open_files()):
        service = _service(front, listeners, console)
        try:
            with console.talking():
                up = await unless_done(signals.stop, service.start())
            _announce(console, up, listeners, settings.host, api)
            with _throughput_lines(service, settings.log_stats_interval):
                await serve_until_stopped(
                    service,
                    signals,
                    on_stop=lambda: console.say(
                        f"Stopping; completions in flight: {service.num_in_flight}"
                    ),
                )
        except Interrupted:
            raise Stopped(signals.number) from None
        finally:
            await service.close(at_once=signals.at_once.done())


def _service(front: FrontSettings, listeners: Sequence[socket.socket], console: Console) -> Service:
    """Returns a front in this process, or the main process of several fronts."""
    if front.server.api_server_count > 1:
        return MainProcess(front, listeners, console.progress)

    counts = LocalCounts(num_cells(front.config.parallel.data_parallel_size))

    def on_progress(event: Progress) -> None:
        console.progress(event)
        service.state.phase = console.phase

    async def connect() -> EngineClient:
        client = await EngineClient.start(
            front.config, factory=front.server.engine_factory, on_progress=on_progress
        )
        client.on_outputs = StepMetrics(counts.own).step_done
        return client

    service = Front(front, connect, listeners, counts=counts)
    return service


def _throughput_lines(
    service: Service, interval_s: float
) -> contextlib.AbstractContextManager[None]:
    if interval_s <= 0:
        return contextlib.nullcontext()
    return background(log_throughput(service, interval_s=interval_s))


def _announce(
    console: Console, up: FrontUp, listeners: Sequence[socket.socket], host: str, api: ApiSettings
) -> None:
    """Prints the resolved settings, a warning if access is open, and the URL."""
    console.decisions(up.decisions)
    if not is_local(listeners) and not api.api_key:
        console.say(
            "  WARNING: anyone who can reach this machine can use the server; see --api-key"
        )
    console.ready(
        url=f"{url_of(listeners, host)}/v1",
        model=up.name,
        context=up.max_model_len,
        is_chat=up.is_chat,
        needs_key=bool(api.api_key),
    )


def read_template(path: str | None) -> str | None:
    """Returns the contents of a ``--chat-template`` file, None for None. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error

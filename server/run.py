"""Runs a server process: listen, start the engines, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from jaxserve.client.engine_client import SHUTDOWN_TIMEOUT_S, EngineClient
from jaxserve.client.protocol import Engine
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.front.counts import Counts, LocalCounts
from jaxserve.front.metrics import StepMetrics, num_cells
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.program.signals import StopSignals
from jaxserve.program.threads import in_daemon_thread
from server.app import create_app
from server.console import Console
from server.http import HttpProtocol, HttpServer
from server.listen import is_local, url_of
from server.open_files import watch_open_files
from server.settings import ApiSettings, ServerSettings
from server.state import ServerState
from server.throughput import log_throughput

T = TypeVar("T")

LAST_BYTES_TIMEOUT_S = 2
"""Seconds that connections may take to close once no request is in flight."""


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
    state = ServerState(counts=LocalCounts(num_cells(config.parallel.data_parallel_size)))
    state.config = config
    http = http_server(create_app(state, api, is_local=is_local(listeners)), settings)
    with StopSignals() as signals, _background(watch_open_files()):
        serving = asyncio.create_task(http.serve(sockets=list(listeners)))
        client: EngineClient | None = None
        try:
            with console.talking():
                text_engine, client = await _unless_stopped(
                    signals.stop, _start(config, api, settings, console, state)
                )
            state.text_engine = text_engine
            _announce(console, text_engine, listeners, settings.host, api)
            with _throughput_lines(client, settings.log_stats_interval):
                ends = {signals.stop, serving, *(() if settings.keep_running else (client.gone,))}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            state.draining = True
            console.say(f"Stopping; completions in flight: {text_engine.num_in_flight}")
            await _replied(http, settings.shutdown_timeout, signals)
            state.aborting = True
            await client.drain(0)
            if client.gone.done() and not signals.stop.done():
                raise client.gone.result()
        finally:
            state.draining = True
            http.should_exit = True
            await serving
            if client is not None:
                in_a_hurry = signals.at_once.done()
                await client.close(timeout_s=0 if in_a_hurry else SHUTDOWN_TIMEOUT_S)


async def _start(
    config: EngineConfig,
    api: ApiSettings,
    settings: ServerSettings,
    console: Console,
    state: ServerState,
) -> tuple[TextEngine, EngineClient]:
    """Starts the engines, and loads the tokenizer in the meantime."""

    def on_progress(event: Any) -> None:
        console.progress(event)
        state.phase = console.phase

    template = read_template(settings.chat_template)
    starting = asyncio.create_task(
        EngineClient.start(config, factory=settings.engine_factory, on_progress=on_progress)
    )
    try:
        files = await in_daemon_thread(ModelFiles.open, config.model)
        client = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    text_engine = make_text_engine(
        client, files, api, settings, chat_template=template, counts=state.counts
    )
    client.on_outputs = StepMetrics(state.counts.own).step_done
    # All objects so far live as long as the process, so the garbage collector need not scan them.
    gc.collect()
    gc.freeze()
    return text_engine, client


def make_text_engine(
    engine: Engine,
    files: ModelFiles,
    api: ApiSettings,
    settings: ServerSettings,
    *,
    chat_template: str | None,
    counts: Counts | None = None,
) -> TextEngine:
    """Returns a text engine on ``engine`` with these settings. Raises ConfigError."""
    model = ServedModel.create(
        engine.ready,
        files.tokenizer,
        names=api.served_model_name or (files.name,),
        defaults=files.defaults,
        chat_template=chat_template,
        template_variables=settings.template_variables,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    return TextEngine(engine, model, max_in_flight=api.max_queue, counts=counts)


async def _unless_stopped(stop: asyncio.Future[int], work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. Cancels it and raises Stopped if a signal comes first."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    # If both are done, the signal may be the reason why the work failed.
    if task.done() and (task.exception() is None or not stop.done()):
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise Stopped(stop.result())


def _throughput_lines(
    client: EngineClient, interval_s: float
) -> contextlib.AbstractContextManager[None]:
    if interval_s <= 0:
        return contextlib.nullcontext()
    return _background(log_throughput(client, interval_s=interval_s))


@contextlib.contextmanager
def _background(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs ``work`` while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def _replied(http: HttpServer, timeout_s: float, signals: StopSignals) -> None:
    """Waits until the requests that have arrived have their replies, or no longer may take time.

    New requests must be refused by now. ``timeout_s`` begins when ``signals.limited`` is set.
    """
    replies = set(http.server_state.tasks)
    if not replies:
        return
    replied = asyncio.create_task(asyncio.wait(replies))
    if signals.stop.done():
        await asyncio.wait({replied, signals.limited}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(
        {replied, signals.at_once}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    replied.cancel()


def http_server(app: Starlette, settings: ServerSettings) -> HttpServer:
    """Returns an HTTP server for ``app``. Pass the listening sockets to its ``serve``."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=partial(HttpProtocol, write_timeout_s=settings.write_timeout),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_timeout,
            timeout_graceful_shutdown=2 * LAST_BYTES_TIMEOUT_S,  # for tasks that hang
        ),
        last_bytes_s=LAST_BYTES_TIMEOUT_S,
    )


def _announce(
    console: Console,
    text_engine: TextEngine,
    listeners: Sequence[socket.socket],
    host: str,
    api: ApiSettings,
) -> None:
    """Prints the resolved settings, a warning if access is open, and the URL."""
    sampling, source = text_engine.model.defaults.describe()
    console.decisions([*text_engine.engine.ready.decisions, ("sampling", sampling, source)])
    if not is_local(listeners) and not api.api_key:
        console.say(
            "  WARNING: anyone who can reach this machine can use the server; see --api-key"
        )
    console.ready(
        url=f"{url_of(listeners, host)}/v1",
        model=text_engine.model.name,
        context=text_engine.model.max_model_len,
        is_chat=text_engine.model.chat_template is not None,
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

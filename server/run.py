"""Runs a server process: listen, start the engines, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from jaxserve.client.engine_client import EngineClient
from jaxserve.client.protocol import Engine
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from server.app import create_app
from server.console import Console
from server.http import HttpProtocol, HttpServer
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


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address. Raises ConfigError if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        ) from error
    listener.setblocking(False)
    return listener


def is_local(listener: socket.socket) -> bool:
    """Returns True if only this machine can reach the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


async def serve(
    listener: socket.socket,
    config: EngineConfig,
    api: ApiSettings,
    settings: ServerSettings,
    console: Console,
) -> None:
    """Serves until a SIGINT or SIGTERM; a second one aborts the requests in flight.

    Raises:
      Stopped: a signal arrived before the server was ready.
      JaxserveError: the server cannot start.
    """
    state = ServerState()
    state.config = config
    stop, hurry = _signals()
    http = http_server(create_app(state, api, is_local=is_local(listener)), settings)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    client: EngineClient | None = None
    try:
        with console.talking():
            text_engine, client = await _unless_stopped(
                stop, _start(config, api, settings, console, state)
            )
        state.text_engine = text_engine
        _announce(console, text_engine, listener, api)
        with _throughput_lines(client, settings.log_stats_interval):
            await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        console.say(f"Stopping; completions in flight: {text_engine.num_in_flight}")
        state.draining = True
        await _drain(client, settings.shutdown_timeout, hurry)
    finally:
        state.draining = True
        http.should_exit = True
        await serving
        if client is not None:
            await client.close()


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
        files = await asyncio.to_thread(ModelFiles.open, config.model)
        client = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    text_engine = make_text_engine(client, files, api, settings, chat_template=template)
    client.on_outputs = text_engine.metrics.step_done
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
    return TextEngine(engine, model, max_in_flight=api.max_queue)


async def _unless_stopped(stop: asyncio.Future[int], work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. Cancels it and raises Stopped if a signal comes first."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise Stopped(stop.result())


def _signals() -> tuple[asyncio.Future[int], asyncio.Future[int]]:
    """Returns futures that the first and the second SIGINT or SIGTERM set to the signal number."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()

    def handle(number: int) -> None:
        waiting = next((f for f in (first, second) if not f.done()), None)
        if waiting is not None:
            waiting.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    return first, second


@contextlib.contextmanager
def _throughput_lines(client: EngineClient, interval_s: float) -> Iterator[None]:
    if interval_s <= 0:
        yield
        return
    task = asyncio.create_task(log_throughput(client, interval_s=interval_s))
    try:
        yield
    finally:
        task.cancel()


async def _drain(client: EngineClient, timeout_s: float, hurry: asyncio.Future[int]) -> None:
    """Waits for requests to finish until the timeout or until ``hurry`` is set; aborts the rest."""
    draining = asyncio.create_task(client.drain(timeout_s))
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await client.drain(0)


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
    console: Console, text_engine: TextEngine, listener: socket.socket, api: ApiSettings
) -> None:
    """Prints the resolved settings, a warning if access is open, and the URL."""
    host, port = listener.getsockname()[:2]
    sampling, source = text_engine.model.defaults.describe()
    console.decisions([*text_engine.engine.ready.decisions, ("sampling", sampling, source)])
    if not is_local(listener) and not api.api_key:
        console.say(
            "  WARNING: anyone who can reach this machine can use the server; see --api-key"
        )
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
    if reachable is None:
        reachable = f"[{host}]" if ":" in host else host
    console.ready(
        url=f"http://{reachable}:{port}/v1",
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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error

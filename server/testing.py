"""Runs a whole server in threads of this process, for tests: real sockets, no other processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import ASGIApp

from jaxserve.cli import read_flags
from jaxserve.client.in_process import InProcessEngine
from jaxserve.config import EngineConfig
from jaxserve.engine.process import load_factory
from jaxserve.errors import ConfigError
from jaxserve.front.served_model import ModelFiles
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import Progress
from server.__main__ import make_parser, read_config
from server.app import create_app
from server.listen import is_local, listen, url_of
from server.run import read_template
from server.serving import http_server, make_text_engine
from server.settings import ApiSettings, ServerSettings
from server.state import ServerState

T = TypeVar("T")


class ServerThread:
    """Serves a model from construction until `close`.

    Args:
      *argv: the arguments of ``python -m server``. By default, the port is a free one.

    Attributes:
      url: URL of the server, without a path.
      text_engine: serves the requests, in the thread of the server; see `call`.

    Raises:
      JaxserveError: the server cannot start.
    """

    def __init__(self, *argv: str) -> None:
        args = make_parser().parse_args(["--port", "0", *argv])
        self._settings = read_flags(args, ServerSettings)
        self._api = read_flags(args, ApiSettings)
        if self._settings.api_server_count > 1:
            raise ConfigError("--api-server-count must be 1: this server is in one process")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        try:
            self.call(self._start(read_config(args)))
        except BaseException:
            self._end_loop()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of the server, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stops the server and aborts the requests in flight."""
        self.call(self._stop())
        self._end_loop()

    async def _start(self, config: EngineConfig) -> None:
        files = ModelFiles.open(config.model)
        template = read_template(self._settings.chat_template)
        build = load_factory(self._settings.engine_factory)
        self._engine = await InProcessEngine.start(functools.partial(build, config, 0, _ignore))
        try:
            self.text_engine: TextEngine = make_text_engine(
                self._engine, files, self._api, self._settings, chat_template=template
            )
        except BaseException:
            await self._engine.close()
            raise
        state = ServerState(self.text_engine)
        state.config = config
        listeners = listen(self._settings.host, self._settings.port)
        self.url = url_of(listeners, self._settings.host)
        app = create_app(state, self._api, is_local=is_local(listeners))
        self._http = http_server(app, self._settings)
        self._serving = asyncio.create_task(self._http.serve(sockets=listeners))

    async def _stop(self) -> None:
        self.text_engine.abort(None)
        self._http.should_exit = True
        await self._serving
        await self._engine.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _ignore(progress: Progress) -> None:
    pass


def flags(**settings: object) -> Sequence[str]:
    """Returns flags: ``num_blocks=8`` is ``--num-blocks 8``, booleans are ``--x`` or ``--no-x``."""
    argv: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple | list):
            argv += [f"--{flag}", *map(str, value)]
        else:
            argv += [f"--{flag}", str(value)]
    return argv


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """Serves an application and yields its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = http_server(app, ServerSettings())  # type: ignore[arg-type]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task

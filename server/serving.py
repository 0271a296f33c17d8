"""A front: the HTTP server of one process and the requests that it serves, from start to end.

With one front it is in the main process (`server.run`), else each has a process of its own
(`server.front`). What differs is only where the engines and the connections come from.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import uvicorn
from starlette.applications import Starlette

from jaxserve.checkpoint.fingerprint import FILES_HAVE_CHANGED
from jaxserve.client.engine_client import SHUTDOWN_TIMEOUT_S, EngineClient
from jaxserve.client.protocol import Engine
from jaxserve.errors import CheckpointError, JaxserveError
from jaxserve.front.counts import Counts
from jaxserve.front.served_model import ModelFiles, ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.control import FrontUp
from jaxserve.ipc.messages import Decision, StepStats
from jaxserve.program.stops import Stops
from jaxserve.program.threads import in_daemon_thread
from server.app import create_app
from server.http import HttpProtocol
from server.http_server import HttpServer
from server.settings import ApiSettings, FrontSettings, ServerSettings
from server.state import ServerState

LAST_BYTES_TIMEOUT_S = 2
"""Seconds that connections may take to close once no request is in flight."""


class Front:
    """Serves HTTP from its construction on; until `start` has returned, every reply is a 503.

    Implements `server.service.Service`.

    Args:
      settings: its settings.
      connect: returns the client of the engines, once they can serve.
      listeners: sockets that listen. Further connections can come through `HttpServer.adopt`.
      counts: where requests are counted.
      fingerprint: the `ModelFiles.fingerprint` that the files must have; "" for any.

    Attributes:
      state: the state that all routes share.
      http: the HTTP server.
    """

    def __init__(
        self,
        settings: FrontSettings,
        connect: Callable[[], Awaitable[EngineClient]],
        listeners: Sequence[socket.socket] = (),
        *,
        counts: Counts,
        fingerprint: str = "",
    ) -> None:
        """Begins to serve. Needs a running event loop."""
        self.state = ServerState(counts=counts)
        self.state.config = settings.config
        self.state.created = settings.created
        self.state.api_server_count = settings.server.api_server_count
        app = create_app(self.state, settings.api, is_local=settings.is_local)
        self.http = http_server(app, settings.server)
        self._settings = settings
        self._connect = connect
        self._fingerprint = fingerprint
        self._client: EngineClient | None = None
        self._serving = asyncio.create_task(self.http.serve(sockets=list(listeners)))

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """See `Service.stats`."""
        return {} if self._client is None else self._client.stats

    @property
    def num_in_flight(self) -> int:
        """See `Service.num_in_flight`."""
        return self.state.load()

    @property
    def error(self) -> JaxserveError | None:
        """See `Service.error`: no engine is left."""
        gone = None if self._client is None else self._client.gone
        return gone.result() if gone is not None and gone.done() else None

    async def start(self) -> FrontUp:
        """See `Service.start`. Reads the tokenizer while the engines start."""
        settings = self._settings
        connecting = asyncio.ensure_future(self._connect())
        try:
            files = await in_daemon_thread(ModelFiles.open, settings.config.model)
            if self._fingerprint not in ("", files.fingerprint):
                raise CheckpointError(FILES_HAVE_CHANGED)
            self._client = await connecting
        except BaseException:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            raise
        text_engine = make_text_engine(
            self._client,
            files,
            settings.api,
            settings.server,
            chat_template=settings.chat_template,
            counts=self.state.counts,
        )
        # All objects so far live as long as the process, so the garbage collector need not scan
        # them.
        gc.collect()
        gc.freeze()
        self.state.text_engine = text_engine
        model = text_engine.model
        sampling = Decision("sampling", *model.defaults.describe())
        return FrontUp(
            model.name,
            model.max_model_len,
            model.chat_template is not None,
            [*self._client.ready.decisions, sampling],
            files.fingerprint,
        )

    def ends(self) -> list[asyncio.Future]:
        """See `Service.ends`."""
        if self._client is None or self._settings.server.keep_running:
            return [self._serving]
        return [self._serving, self._client.gone]

    def refuse(self, stops: Stops) -> None:
        """See `Service.refuse`."""
        self.state.draining = True

    async def drain(self, stops: Stops) -> None:
        """See `Service.drain`."""
        await self._replied(stops)
        self.state.aborting = True
        if self._client is not None:
            await self._client.drain(0)

    async def close(self, *, at_once: bool) -> None:
        """See `Service.close`. Raises what the HTTP server raised, if it failed."""
        self.state.draining = True
        self.http.should_exit = True
        try:
            await self._serving
        finally:
            if self._client is not None:
                await self._client.close(timeout_s=0 if at_once else SHUTDOWN_TIMEOUT_S)

    async def _replied(self, stops: Stops) -> None:
        """Waits until the requests that have arrived have replies, or no longer may take time.

        The shutdown timeout begins when ``stops.limited`` is set.
        """
        replies = set(self.http.server_state.tasks)
        if not replies:
            return
        replied = asyncio.create_task(asyncio.wait(replies))
        await stops.give_time(replied, self._settings.server.shutdown_timeout)
        replied.cancel()


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

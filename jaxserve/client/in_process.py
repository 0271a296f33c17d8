"""An engine in a thread of this process, without sockets or a child process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress

from jaxserve.client.output_stream import OutputStream
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.process import EngineLoop, Inbox
from jaxserve.engine.readers import Outgoing
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError
from jaxserve.ipc.messages import (
    Abort,
    FinishReason,
    Ready,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
)

logger = logging.getLogger(__name__)


class InProcessEngine:
    """Implements `Engine` with an `EngineCore` in a thread.

    Call everything on the event loop on which `start` was called.

    event loop    generate() ──> inbox ──>  engine thread: EngineLoop (jax lives here)
                  OutputStream <── call_soon_threadsafe ──┘
    """

    def __init__(self, build: Callable[[], BuiltEngine]) -> None:
        """Creates the thread without starting it. Use `start`."""
        self._event_loop = asyncio.get_running_loop()
        self._inbox: Inbox = queue.SimpleQueue()
        self._ready: asyncio.Future[Ready] = self._event_loop.create_future()
        self._streams: dict[str, OutputStream] = {}
        self._stats = StepStats()
        self._error: JaxserveError | None = None
        self._ended = asyncio.Event()
        # A daemon thread, so that a program that never calls `close` can still exit.
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)

    @classmethod
    async def start(cls, build: Callable[[], BuiltEngine]) -> InProcessEngine:
        """Builds an engine in its thread and waits until it can serve.

        Raises what ``build`` raises.
        """
        engine = cls(build)
        await engine.until_ready()
        return engine

    async def until_ready(self) -> None:
        """Starts the thread and waits until the engine can serve; call it once.

        Raises what ``build`` raises. After a cancellation the engine ends as soon as it is built.
        """
        self._thread.start()
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self._inbox.put(Shutdown())
            raise

    @property
    def ready(self) -> Ready:
        """The resolved settings of the engine."""
        return self._ready.result()

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The latest state of the engine, by its index."""
        return {self.ready.engine: self._stats}

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed or been closed."""
        if self._error is not None:
            raise self._error

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `Engine.generate`."""
        self.check_health()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(
                f"the request ID {request_id!r} is in use by a request in flight",
                param="request_id",
            )
        stream = self._streams[request_id] = OutputStream(on_ended)
        self._inbox.put(request)
        try:
            async for output in stream:
                yield output
        finally:
            if self._streams.get(request_id) is stream:  # not finished
                del self._streams[request_id]
                self._inbox.put(Abort([request_id]))
                stream.close()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self._inbox.put(Abort([request_id]))
                stream.push(RequestOutput(request_id, [], FinishReason.ABORT))

    async def close(self) -> None:
        """Ends the engine after its current step and waits for its thread.

        Requests in flight fail with EngineDeadError. Uses no other thread, so it also works while
        the interpreter exits.
        """
        self._fail(EngineDeadError("the engine has been closed"))
        self._inbox.put(Shutdown())
        await self._ended.wait()
        self._thread.join()

    def _run(self, build: Callable[[], BuiltEngine]) -> None:
        """Builds and runs the engine, on its thread."""
        try:
            built = build()
            self._call_soon(self._ready.set_result, built.ready)
            EngineLoop(built.ready.engine, built.core, self._inbox, self._send).run()
        except BaseException as error:
            self._call_soon(self._on_engine_death, error)
        finally:
            self._call_soon(self._on_engine_end)

    def _send(self, event: Outgoing) -> None:
        self._call_soon(self._handle_event, event)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function on the event loop. Does nothing if the loop is closed."""
        with suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(function, *arguments)

    def _handle_event(self, event: Outgoing) -> None:
        assert isinstance(event, StepOutputs), "there is one reader"
        self._stats = event.stats
        for output in event.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # None if aborted while the step was in flight
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                stream.push(output)

    def _on_engine_death(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved: nobody may wait any more
            return
        logger.error("the engine failed", exc_info=error)
        self._fail(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))

    def _on_engine_end(self) -> None:
        self._ended.set()

    def _fail(self, error: JaxserveError) -> None:
        self._error = self._error or error
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

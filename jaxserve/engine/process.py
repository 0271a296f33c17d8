"""An engine process: ``python -m jaxserve.engine.process``, started by `launcher.EngineProcess`.

Three threads, so that sockets and encoding never delay the device:

    input thread    receive, decode ──> inbox
    main thread     inbox ──> EngineCore.step ──> outbox          (the only user of jax)
    output thread   outbox ──> encode, send

`readers` has what each of them does when several fronts use the engine.

The process exits on `Shutdown`. It exits at once when its standard input ends, because then the
process that started it has exited. Signals that stop the front do not stop it: see `ipc.signals`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import queue
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeAlias

import zmq

from jaxserve.checkpoint.fingerprint import FILES_HAVE_CHANGED
from jaxserve.engine.core import BuiltEngine, EngineCore
from jaxserve.engine.readers import Arrivals, EventSenders, HandledSubmits, Outgoing, SharedStep
from jaxserve.errors import CheckpointError, JaxserveError
from jaxserve.ipc.launch import FAILED_EXIT_CODE, Launch
from jaxserve.ipc.messages import (
    Abort,
    AddReader,
    BadSubmit,
    EngineFailed,
    EngineRequest,
    Ready,
    RemoveReader,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
)
from jaxserve.ipc.parent import begin_child_process, start_thread
from jaxserve.ipc.transport import EventSender, RequestReceiver
from jaxserve.ipc.wire_ids import split

HEARTBEAT_S = 1.0
"""Interval between the heartbeats of an idle engine."""

LINGER_S = 4.0
"""Seconds that the last events may take to reach the front at exit."""

Inbox: TypeAlias = "queue.SimpleQueue[EngineRequest | BadSubmit]"
Outbox: TypeAlias = "queue.SimpleQueue[Outgoing | None]"


class EngineLoop:
    """The main loop of an engine: receives requests, runs steps, sends outputs.

    Args:
      engine: index of the engine, for its events.
      core: runs the requests.
      inbox: the requests of all readers.
      send: called with each event, on the thread of `run`. They are `StepOutputs`, or `SharedStep`
        once there are several readers.
    """

    def __init__(
        self, engine: int, core: EngineCore, inbox: Inbox, send: Callable[[Outgoing], None]
    ) -> None:
        self._engine = engine
        self._core = core
        self._inbox = inbox
        self._send = send
        self._handled = HandledSubmits()
        self._sent: tuple[StepStats | None, int] = (None, 0)

    def run(self) -> None:
        """Runs until `Shutdown` arrives.

        Raises:
          Exception: a step failed; see `EngineCore.step`.
        """
        while True:
            idle = not self._core.has_work
            request = self._wait() if idle else None
            if not self._handle_requests(request):
                return
            outputs = self._core.step(time.monotonic()) if self._core.has_work else []
            # Handle requests that arrived during the step: the front balances load by the counts
            # that `_report` sends.
            if not self._handle_requests():
                return
            self._report(outputs, heartbeat=idle and request is None)

    def _wait(self) -> EngineRequest | BadSubmit | None:
        """Waits for a request; returns None if none arrives within a heartbeat interval."""
        try:
            return self._inbox.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            return None

    def _handle_requests(self, request: EngineRequest | BadSubmit | None = None) -> bool:
        """Handles ``request`` and all queued ones in order; returns False on `Shutdown`."""
        while True:
            match request:
                case Submit(request_id=request_id):
                    self._core.add(request)
                    self._handled.count(request_id)
                case BadSubmit(request_id=request_id, reason=reason):
                    self._core.refuse(request_id, reason)
                    self._handled.count(request_id)
                case Abort(request_ids=ids):
                    self._core.abort(ids)
                case AddReader():
                    self._handled.share()
                    self._sent = (None, 0)  # so that the new reader learns the state at once
                case RemoveReader(reader=reader):
                    self._handled.share()
                    self._core.abort(i for i in self._core.request_ids if split(i)[0] == reader)
                case Shutdown():
                    return False
            try:
                request = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _report(self, outputs: list[RequestOutput], *, heartbeat: bool) -> None:
        stats, handled = self._core.stats(), self._handled
        sent_stats, sent_total = self._sent
        if outputs or heartbeat or stats != sent_stats or handled.total != sent_total:
            self._sent = stats, handled.total
            step = StepOutputs(self._engine, outputs, stats, handled.total)
            self._send(SharedStep(step, handled.by_reader.copy()) if handled.by_reader else step)


def main() -> int:
    """Runs the engine described by the first line of the standard input; returns the exit code."""
    launch = begin_child_process(Launch)
    _set_up_logging(launch)
    return serve(launch)


def _set_up_logging(launch: Launch) -> None:
    """Logs at the level of the front; other libraries log warnings at most."""
    logging.basicConfig(
        level=max(logging.WARNING, launch.log_level),
        format=f"%(levelname)s engine {launch.engine}: %(message)s",
    )
    logging.getLogger("jaxserve").setLevel(launch.log_level)


def serve(launch: Launch) -> int:
    """Builds and runs an engine until `Shutdown` or a failure; returns the exit code."""
    context = zmq.Context()
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    connect = functools.partial(EventSender, context)
    senders = EventSenders(connect, launch.engine, launch.events_address)
    output = start_thread("output", _send_events, outbox, senders)
    core: EngineCore | None = None
    try:
        receiver = RequestReceiver(context, launch.requests_address)
        start_thread("input", _receive_requests, receiver, inbox, Arrivals(outbox.put))
        built = load_factory(launch.factory)(launch.config, launch.engine, outbox.put)
        core = built.core
        _check_fingerprint(launch, built.ready)
        # Weights and programs live as long as the process: exempt them from garbage collection.
        gc.freeze()
        outbox.put(built.ready)
        EngineLoop(launch.engine, core, inbox, outbox.put).run()
        return 0
    except Exception as error:
        running_ids = () if core is None else core.running_ids
        outbox.put(failure(launch.engine, error, running_ids))
        return FAILED_EXIT_CODE
    finally:
        outbox.put(None)
        output.join()
        # Waits until the last events are sent, and ends the input thread.
        context.term()


def _check_fingerprint(launch: Launch, ready: Ready) -> None:
    """Refuses other weights than those with which the requests in flight began."""
    if launch.fingerprint not in ("", ready.fingerprint):
        raise CheckpointError(FILES_HAVE_CHANGED)


def load_factory(name: str) -> Callable[..., BuiltEngine]:
    """Imports the engine factory that ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def failure(engine: int, error: Exception, running_ids: tuple[str, ...]) -> EngineFailed:
    """Returns the event that reports an exception to the front.

    ``running_ids``: the requests that were running.
    """
    is_user_error = isinstance(error, JaxserveError)
    kind = type(error).__name__
    return EngineFailed(
        engine,
        message=str(error) if is_user_error else f"{kind}: {error}",
        traceback="".join(traceback.format_exception(error)),
        is_user_error=is_user_error,
        error_type=kind,
        running_ids=running_ids,
    )


def _receive_requests(receiver: RequestReceiver, inbox: Inbox, arrivals: Arrivals) -> None:
    while (request := receiver.receive()) is not None:
        if arrivals.admit(request):
            inbox.put(request)


def _send_events(outbox: Outbox, senders: EventSenders) -> None:
    while (event := outbox.get()) is not None:
        senders.send(event)
    senders.close(linger_s=LINGER_S)


if __name__ == "__main__":
    sys.exit(main())

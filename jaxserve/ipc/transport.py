"""Sockets between engine processes and their readers, which carry `ipc.messages`.

    reader r                                         engine process p
    RequestSender   ── in-p: Submit, Abort ... ───>   RequestReceiver   binds
    EventReceiver   <── out-p-r: StepOutputs ... ──   EventSender
     binds

The sockets of an engine block and have one thread each. Those of a reader belong to an asyncio
loop. The queues have no limit of their own: the admission limit of the front bounds them. All
constructors of sockets raise ConfigError; see `sockets.bound`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import zmq
import zmq.asyncio

from jaxserve.errors import JaxserveError
from jaxserve.ipc.long_messages import SubmitEncoder, decode_event_in_parts
from jaxserve.ipc.messages import (
    Abort,
    BadSubmit,
    EngineEvent,
    EngineRequest,
    Submit,
    decode_event,
    decode_request,
    encode,
)
from jaxserve.ipc.sockets import bound, connected
from jaxserve.ipc.wire_ids import wire_id

logger = logging.getLogger(__name__)

MAX_EVENTS = 64
"""The most events that one `EventReceiver.receive` returns."""

MAX_BYTES_AT_ONCE = 1 << 17
"""Longer events are decoded in parts. Decoding this many bytes takes 1 ms."""


class RequestSender:
    """Sends the requests of one reader to one engine.

    Close it when the engine is gone; otherwise the socket keeps trying to reconnect.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, *, reader: int = 0) -> None:
        self._reader = reader
        # A plain socket: sending never waits.
        self._socket = connected(lambda: zmq.Socket(context, zmq.PUSH), address)
        self._encoder = SubmitEncoder()

    def send(self, request: EngineRequest) -> None:
        """Queues a request. Never waits for the engine."""
        if self._reader:
            request = _with_wire_ids(request, self._reader)
        is_submit = isinstance(request, Submit)
        self._socket.send(self._encoder.encode(request) if is_submit else encode(request))

    def close(self, *, linger_s: float = 0.0) -> None:
        """Closes the socket. Idempotent.

        Requests that the engine has not received have ``linger_s`` seconds to reach it.
        """
        self._socket.close(linger=round(linger_s * 1000))


class EventReceiver:
    """Receives the events of one engine in a reader."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = bound(lambda: context.socket(zmq.PULL), address)
        self._without_waiting = zmq.Socket.shadow(self._socket)  # the same socket

    async def receive(self) -> list[EngineEvent]:
        """Waits for an event, and returns all events that have arrived, at most `MAX_EVENTS`.

        Logs and skips events that cannot be decoded. Other tasks run while many are decoded, or
        long ones.
        """
        messages = [await self._socket.recv()]
        with contextlib.suppress(zmq.Again):
            while len(messages) < MAX_EVENTS:
                messages.append(self._without_waiting.recv(zmq.NOBLOCK))
        events: list[EngineEvent | None] = []
        num_bytes = 0
        for message in messages:
            num_bytes += len(message)
            is_long = len(message) > MAX_BYTES_AT_ONCE
            if is_long:
                events.append(await _decoded_in_parts(message))
            else:
                events.append(_event(message))
            if num_bytes > MAX_BYTES_AT_ONCE:
                await asyncio.sleep(0)
                num_bytes = 0
        return [event for event in events if event is not None]

    def close(self) -> None:
        """Closes the socket. No `receive` may be waiting. Idempotent."""
        self._socket.close(linger=0)


class RequestReceiver:
    """Receives requests in an engine. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = bound(lambda: context.socket(zmq.PULL), address)

    def receive(self) -> EngineRequest | BadSubmit | None:
        """Waits for the next request.

        Returns None, with the socket closed, when the context is being terminated. Logs messages
        that cannot be decoded, and skips them unless they are from a request.
        """
        while True:
            try:
                data = self._socket.recv()
            except zmq.ContextTerminated:
                self._socket.close(linger=0)
                return None
            request = _request(data)
            if request is not None:
                return request

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close(linger=0)


class EventSender:
    """Sends events from an engine to one reader. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = connected(lambda: context.socket(zmq.PUSH), address)

    def send(self, event: EngineEvent) -> None:
        """Queues an event. Never waits for the reader."""
        self._socket.send(encode(event))

    def close(self, *, linger_s: float) -> None:
        """Closes the socket. Queued events have ``linger_s`` seconds to reach the reader."""
        self._socket.close(linger=round(linger_s * 1000))


def _with_wire_ids(request: EngineRequest, reader: int) -> EngineRequest:
    """Returns a request of ``reader`` with the IDs that it has on the wire."""
    match request:
        case Submit():
            name = wire_id(reader, request.request_id)
            return msgspec.structs.replace(request, request_id=name)
        case Abort():
            return Abort([wire_id(reader, name) for name in request.request_ids])
        case _:
            return request


async def _decoded_in_parts(data: bytes) -> EngineEvent | None:
    """Does the same as `_event` for a long event, and lets other tasks run between its parts."""
    parts = decode_event_in_parts(data)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
        except _BAD_MESSAGE:
            _log_bad(data)
            return None
        await asyncio.sleep(0)


# Structs check themselves when they are decoded.
_BAD_MESSAGE = (msgspec.MsgspecError, JaxserveError, RecursionError)


def _event(data: bytes) -> EngineEvent | None:
    try:
        return decode_event(data)
    except _BAD_MESSAGE:
        _log_bad(data)
        return None


def _request(data: bytes) -> EngineRequest | BadSubmit | None:
    try:
        return decode_request(data)
    except _BAD_MESSAGE as error:
        _log_bad(data)
        request_id = _submit_id(data)
        if request_id is None:
            return None
        return BadSubmit(request_id, f"the engine cannot read the request: {error}")


def _submit_id(data: bytes) -> str | None:
    """Returns the ID of the request in an invalid `Submit`, if it has one."""
    with contextlib.suppress(*_BAD_MESSAGE):
        match msgspec.msgpack.decode(data):
            case ["submit", str(request_id), *_]:
                return request_id
    return None


def _log_bad(data: bytes) -> None:
    logger.exception("dropped a message of %d bytes that cannot be decoded", len(data))

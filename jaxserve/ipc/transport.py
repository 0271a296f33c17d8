"""Sockets between the front process and its engines, which carry `ipc.messages`.

    front                                            engine i
    RequestSender   ── requests-i: Submit, Abort ──>  RequestReceiver   binds
    EventReceiver   <── events: StepOutputs ... ────  EventSender
     binds, one for all engines

The sockets of the engine block and have one thread each. Those of the front belong to an asyncio
loop. The queues have no limit of their own: the admission limit of the front bounds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from jaxserve.ipc.long_messages import SubmitEncoder, decode_event_in_parts
from jaxserve.ipc.messages import (
    EngineEvent,
    EngineRequest,
    Submit,
    decode_event,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_EVENTS = 64
"""The most events that one `EventReceiver.receive` returns."""

MAX_BYTES_AT_ONCE = 1 << 17
"""Longer events are decoded in parts. Decoding this many bytes takes 1 ms."""

MAX_SOCKET_PATH = 107
"""The most bytes in the path of a Unix socket (``sun_path`` without its final zero)."""


class SocketFolder:
    """A new folder for the sockets of one front, private to its user (mode 0700).

    It is in the temporary folder, or in /tmp if the paths of the sockets would be too long there.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="jaxserve-")
        longest = os.path.join(self.path, "requests-000000")
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")

    @property
    def events(self) -> str:
        """The address that the front binds and every engine connects to."""
        return f"ipc://{self.path}/events"

    def requests(self, engine: int) -> str:
        """The address that one engine binds and the front connects to."""
        return f"ipc://{self.path}/requests-{engine}"

    def remove(self) -> None:
        """Removes the folder and its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


class RequestSender:
    """Sends requests from the front to one engine.

    Close it when the engine is gone; otherwise the socket keeps trying to reconnect.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = zmq.Socket(context, zmq.PUSH)  # a plain socket: sending never waits
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = SubmitEncoder()

    def send(self, request: EngineRequest) -> None:
        """Queues a request. Never waits for the engine."""
        is_submit = isinstance(request, Submit)
        self._socket.send(self._encoder.encode(request) if is_submit else encode(request))

    def close(self) -> None:
        """Closes the socket and drops requests that the engine has not received. Idempotent."""
        self._socket.close(linger=0)


class EventReceiver:
    """Receives the events of all engines in the front."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._without_waiting = zmq.Socket.shadow(self._socket)  # the same socket

    async def receive(self) -> list[EngineEvent]:
        """Waits for an event, and returns all events that have arrived, at most `MAX_EVENTS`.

        Logs and skips events that cannot be decoded. Other tasks run while a long one is decoded.
        """
        messages = [await self._socket.recv()]
        with contextlib.suppress(zmq.Again):
            while len(messages) < MAX_EVENTS:
                messages.append(self._without_waiting.recv(zmq.NOBLOCK))
        events: list[EngineEvent | None] = []
        for message in messages:
            is_long = len(message) > MAX_BYTES_AT_ONCE
            if is_long:
                events.append(await _decoded_in_parts(message))
            else:
                events.append(_decoded(decode_event, message))
        return [event for event in events if event is not None]

    def close(self) -> None:
        """Closes the socket. No `receive` may be waiting. Idempotent."""
        self._socket.close(linger=0)


class RequestReceiver:
    """Receives requests in an engine. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)

    def receive(self) -> EngineRequest | None:
        """Waits for the next request.

        Returns None, with the socket closed, when the context is being terminated. Logs and skips
        requests that cannot be decoded.
        """
        while True:
            try:
                data = self._socket.recv()
            except zmq.ContextTerminated:
                self._socket.close(linger=0)
                return None
            request = _decoded(decode_request, data)
            if request is not None:
                return request

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close(linger=0)


class EventSender:
    """Sends events from an engine to the front. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, event: EngineEvent) -> None:
        """Queues an event. Never waits for the front."""
        self._socket.send(encode(event))

    def close(self, *, linger_s: float) -> None:
        """Closes the socket. Events already queued have ``linger_s`` seconds to reach the front."""
        self._socket.close(linger=round(linger_s * 1000))


async def _decoded_in_parts(data: bytes) -> EngineEvent | None:
    """Does the same as `_decoded` for a long event, and lets other tasks run between its parts."""
    parts = decode_event_in_parts(data)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
        except msgspec.MsgspecError:
            logger.exception("dropped a message of %d bytes that cannot be decoded", len(data))
            return None
        await asyncio.sleep(0)


def _decoded(decode: Callable[[bytes], Message], data: bytes) -> Message | None:
    try:
        return decode(data)
    except msgspec.MsgspecError:
        logger.exception("dropped a message of %d bytes that cannot be decoded", len(data))
        return None

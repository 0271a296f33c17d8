"""Sockets between the front process and its engines, which carry `ipc.messages`.

    front                                            engine i
    RequestSender   ── requests-i: Submit, Abort ──>  RequestReceiver   binds
    EventReceiver   <── events: StepOutputs ... ────  EventSender
     binds, one for all engines

The engine's side blocks, one thread per socket; the front's side belongs to an asyncio loop. No
queue has a limit: what is in flight is bounded by the requests that the front lets in.
"""

from __future__ import annotations

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

from jaxserve.ipc.messages import (
    EngineEvent,
    EngineRequest,
    decode_event,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_EVENTS = 64
"""How many events the front takes in before it acts on them."""

MAX_SOCKET_PATH = 107
"""Bytes that a path in the address of a Unix socket can have (``sun_path`` less its end)."""


class SocketFolder:
    """A new folder for the sockets of one front, closed to other users (mode 0700)."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="jaxserve-")
        longest = os.path.join(self.path, "requests-000000")
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix="jaxserve-", dir="/tmp")

    @property
    def events(self) -> str:
        """The address to which every engine sends."""
        return f"ipc://{self.path}/events"

    def requests(self, engine: int) -> str:
        """The address at which one engine listens."""
        return f"ipc://{self.path}/requests-{engine}"

    def remove(self) -> None:
        """Removes the folder and what is left in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)


class RequestSender:
    """The front's way to one engine; to be closed when that is gone, or it tries to reconnect."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = zmq.Socket(context, zmq.PUSH)  # not an asyncio one: it never waits
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, request: EngineRequest) -> None:
        """Hands the request to the socket, which never makes the caller wait for the engine."""
        self._socket.send(encode(request))

    def close(self) -> None:
        """Drops what the engine has not taken. May be called again."""
        self._socket.close(linger=0)


class EventReceiver:
    """Where the front hears from all of its engines."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._without_waiting = zmq.Socket.shadow(self._socket)  # the same socket

    async def receive(self) -> list[EngineEvent]:
        """Waits for the next event, and returns all that have come, at most `MAX_EVENTS`.

        One that cannot be decoded is logged and left out.
        """
        messages = [await self._socket.recv()]
        with contextlib.suppress(zmq.Again):
            while len(messages) < MAX_EVENTS:
                messages.append(self._without_waiting.recv(zmq.NOBLOCK))
        events = [_decoded(decode_event, message) for message in messages]
        return [event for event in events if event is not None]

    def close(self) -> None:
        """May be called again. No `receive` may be waiting."""
        self._socket.close(linger=0)


class RequestReceiver:
    """Where an engine listens to the front. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)

    def receive(self) -> EngineRequest | None:
        """Waits for the next request; None, and closed, once the context is being terminated.

        A request that cannot be decoded is logged and left out.
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
        """May be called again."""
        self._socket.close(linger=0)


class EventSender:
    """An engine's way to the front. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, event: EngineEvent) -> None:
        """Hands the event to the socket, which never makes the caller wait for the front."""
        self._socket.send(encode(event))

    def close(self, *, linger_s: float) -> None:
        """Closes; what was sent has ``linger_s`` seconds to leave, while the context ends."""
        self._socket.close(linger=round(linger_s * 1000))


def _decoded(decode: Callable[[bytes], Message], data: bytes) -> Message | None:
    try:
        return decode(data)
    except msgspec.MsgspecError:
        logger.exception("dropped a message of %d bytes that cannot be decoded", len(data))
        return None

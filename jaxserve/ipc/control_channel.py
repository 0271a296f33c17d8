"""The socket between the main process and one front process, which carries `ipc.control`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from jaxserve.ipc.control import FromFront, ToFront

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class ControlChannel(Generic[Incoming, Outgoing]):
    """One end of the channel. Make it with `of_main` or `of_front`."""

    def __init__(self, socket: zmq.asyncio.Socket, incoming: Any) -> None:
        self._socket = socket
        self._socket.set_hwm(0)
        self._without_waiting = zmq.Socket.shadow(socket)  # the same socket: sending never waits
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    @staticmethod
    def of_main(context: zmq.asyncio.Context, address: str) -> ControlChannel[FromFront, ToFront]:
        """Returns the end of the main process, which must exist first."""
        socket = context.socket(zmq.PAIR)
        socket.bind(address)
        return ControlChannel(socket, FromFront)

    @staticmethod
    def of_front(context: zmq.asyncio.Context, address: str) -> ControlChannel[ToFront, FromFront]:
        """Returns the end of the front process."""
        socket = context.socket(zmq.PAIR)
        socket.connect(address)
        return ControlChannel(socket, ToFront)

    def send(self, message: Outgoing) -> None:
        """Queues a message. Never waits for the other process."""
        self._without_waiting.send(self._encoder.encode(message))

    async def receive(self) -> Incoming:
        """Waits for the next message.

        Raises:
          msgspec.MsgspecError: a message cannot be decoded; then one of the processes has a defect.
        """
        return self._decoder.decode(await self._socket.recv())

    def close(self, *, linger_s: float = 0) -> None:
        """Closes the socket; queued messages have ``linger_s`` seconds to leave. Idempotent.

        No `receive` may be waiting.
        """
        self._socket.close(linger=round(linger_s * 1000))

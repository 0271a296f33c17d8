"""The sockets between the main process and one front process, which carry `ipc.control`.

    main process                                front process
    sender    ── main-r: ToFront ──────────────> receiver, binds
    receiver, binds <── front-r: FromFront ───── sender

As between a front and an engine, the receiver binds and the sender connects. So a message can be
sent before the other process has started; with a socket for both directions it would block.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from jaxserve.errors import ConfigError
from jaxserve.ipc.control import FromFront, ToFront
from jaxserve.ipc.socket_folder import SocketFolder, remove_socket
from jaxserve.ipc.sockets import bound, connected

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class ControlAddresses(msgspec.Struct, frozen=True):
    """The addresses of the two sockets.

    Attributes:
      to_front: the front binds it.
      to_main: the main process binds it.
    """

    to_front: str
    to_main: str

    @classmethod
    def of(cls, folder: SocketFolder, reader: int) -> ControlAddresses:
        """Returns the addresses for front process number ``reader``."""
        return cls(f"ipc://{folder.path}/main-{reader}", f"ipc://{folder.path}/front-{reader}")

    def remove(self) -> None:
        """Removes the files that a killed process has left behind."""
        remove_socket(self.to_front)
        remove_socket(self.to_main)


class ControlChannel(Generic[Incoming, Outgoing]):
    """One end of the channel. Make it with `of_main` or `of_front`."""

    def __init__(self, context: zmq.asyncio.Context, own: str, other: str, incoming: Any) -> None:
        self._receiver = bound(lambda: context.socket(zmq.PULL), own)
        try:
            # A plain socket: sending never waits.
            self._sender = connected(lambda: zmq.Socket(context, zmq.PUSH), other)
        except ConfigError:
            self._receiver.close(linger=0)
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    @staticmethod
    def of_main(
        context: zmq.asyncio.Context, addresses: ControlAddresses
    ) -> ControlChannel[FromFront, ToFront]:
        """Returns the end of the main process. Raises ConfigError; see `sockets.bound`."""
        return ControlChannel(context, addresses.to_main, addresses.to_front, FromFront)

    @staticmethod
    def of_front(
        context: zmq.asyncio.Context, addresses: ControlAddresses
    ) -> ControlChannel[ToFront, FromFront]:
        """Returns the end of the front process. Raises ConfigError; see `sockets.bound`."""
        return ControlChannel(context, addresses.to_front, addresses.to_main, ToFront)

    def send(self, message: Outgoing) -> None:
        """Queues a message. Never waits for the other process."""
        self._sender.send(self._encoder.encode(message))

    async def receive(self) -> Incoming:
        """Waits for the next message.

        Raises:
          msgspec.MsgspecError: a message cannot be decoded; then one of the processes has a defect.
        """
        return self._decoder.decode(await self._receiver.recv())

    def close(self, *, linger_s: float = 0) -> None:
        """Closes the sockets; queued messages have ``linger_s`` seconds to leave. Idempotent.

        No `receive` may be waiting.
        """
        self._sender.close(linger=round(linger_s * 1000))
        self._receiver.close(linger=0)

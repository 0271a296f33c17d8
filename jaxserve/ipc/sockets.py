"""Opens the sockets of `ipc.transport`. One that cannot be opened is closed again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from jaxserve.errors import ConfigError

AnySocket = TypeVar("AnySocket", bound="zmq.Socket[Any]")


def bound(make: Callable[[], AnySocket], address: str) -> AnySocket:
    """Returns a new socket that is bound to ``address`` and has queues without a limit.

    Args:
      make: creates the socket.
      address: for example ``ipc:///tmp/folder/out-0-0``.

    Raises:
      ConfigError: the folder of the address is missing or full, or the process has too many files
        open. No socket is left, so the context can be terminated.
    """
    return _opened(make, lambda socket: socket.bind(address), address)


def connected(make: Callable[[], AnySocket], address: str) -> AnySocket:
    """Does the same as `bound` with a socket that connects. ``address`` need not be bound yet."""
    return _opened(make, lambda socket: socket.connect(address), address)


def _opened(
    make: Callable[[], AnySocket], open_at: Callable[[AnySocket], object], address: str
) -> AnySocket:
    try:
        socket = make()
    except zmq.ZMQError as error:
        raise _refused(error, address) from error
    try:
        socket.set_hwm(0)
        open_at(socket)
    except BaseException as error:
        socket.close(linger=0)
        if isinstance(error, zmq.ZMQError):
            raise _refused(error, address) from error
        raise
    return socket


def _refused(error: zmq.ZMQError, address: str) -> ConfigError:
    folder = os.path.dirname(address.removeprefix("ipc://"))
    advice = "set TMPDIR to a folder that has room and can be written to"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "raise the limit of open files (ulimit -n)"
    reason = zmq.strerror(error.errno or 0)
    return ConfigError(f"the engines cannot have a socket in {folder}: {reason}; {advice}")

"""The settings of a front process, which it reads from the first line of its standard input."""

from __future__ import annotations

import logging

import msgspec

from jaxserve.ipc.control_channel import ControlAddresses
from server.settings import FrontSettings


class FrontLaunch(msgspec.Struct, frozen=True):
    """The settings of a front process: the first line of its standard input.

    Attributes:
      index: the index of the front, which it keeps over restarts.
      reader: the number of the process as a reader of engines. It is never used again.
      control: the sockets for `ipc.control`.
      counts_fd: the inherited file descriptor of the counts that all processes share.
      settings: what any front needs to know.
      connections_fd: the inherited file descriptor on which accepted connections arrive. Each
        process gets its own when it is started.
      fingerprint: the `FrontUp.fingerprint` that the front must have; "" for any.
      log_level: the level of `logging` from which the front logs; that of the main process.
    """

    index: int
    reader: int
    control: ControlAddresses
    counts_fd: int
    settings: FrontSettings
    connections_fd: int = -1
    fingerprint: str = ""
    log_level: int = logging.WARNING

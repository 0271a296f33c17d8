"""The ties of a process of the server to the one that started it with `ipc.child_process`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from jaxserve.ipc.launch import FAILED_EXIT_CODE
from jaxserve.ipc.signals import leave_signals_to_the_main_process

T = TypeVar("T")

PR_SET_PDEATHSIG = 1


def encode_settings(settings: msgspec.Struct) -> bytes:
    """Returns the line that `begin_child_process` reads: msgpack in hexadecimal digits.

    JSON has no infinite numbers, such as ``--shutdown-timeout inf``.
    """
    return msgspec.msgpack.encode(settings).hex().encode() + b"\n"


def begin_child_process(settings: type[T]) -> T:
    """Ties this process to its parent; call it on the main thread, before anything else.

    From then on the process exits at once when its standard input ends, because then the parent has
    exited. It ignores the signals that stop a server; see `ipc.signals`.

    Returns the settings, which are the first line of the standard input.
    """
    leave_signals_to_the_main_process()
    faulthandler.enable()
    exit_with_parent()
    line = bytes.fromhex(sys.stdin.buffer.readline().decode())
    launch = msgspec.msgpack.decode(line, type=settings)
    start_thread("parent", _exit_at_end_of_input)
    return launch


def exit_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux only).

    This works even if this process is stopped, or stuck in native code that holds the GIL. On other
    systems, or if the parent died before this call, the end of the standard input ends the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """Starts a daemon thread. If it fails, the process exits, since it cannot work without it."""

    def run() -> None:
        try:
            target(*args)
        except Exception:
            traceback.print_exc()
            os._exit(FAILED_EXIT_CODE)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _exit_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)

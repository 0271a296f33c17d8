"""The signals that stop a server.

    signal                    requests in flight
    SIGTERM, SIGHUP, SIGINT   may finish within the shutdown timeout
    SIGQUIT                   may take as long as they need, until one of the signals above arrives
    SIGINT after any of them  are aborted at once
    SIGUSR1, SIGUSR2          go on: the log is standard error, and there is no file to reopen

A second SIGTERM or SIGHUP changes nothing: shells, ``timeout`` and service managers may send a
signal both to a process and to its group. A SIGHUP that is ignored from the start (``nohup``) stays
ignored.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal

from jaxserve.ipc.control import Haste
from server.stops import Stops

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
IGNORED = (signal.SIGUSR1, signal.SIGUSR2)


class StopSignals(Stops):
    """Handles the signals of this process while a server runs in its event loop.

    Use it as a context manager, on the main thread. When it exits, the process is about to end:
    signals are ignored from then on, so that a late one changes neither the exit code nor the log.

    Attributes:
      number: the number of the first signal that stops the server; 0: none has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._loop = asyncio.get_running_loop()
        # Not `loop.add_signal_handler`: a loop that closes restores the default actions.
        ignored_from_start = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for number in STOPPING:
            if number != signal.SIGHUP or not ignored_from_start:
                signal.signal(number, self._on_signal)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        libc = ctypes.CDLL(None)
        for number in STOPPING:
            # Python complains about a signal that arrives while `signal.signal` runs. After the
            # first of these calls none arrives any more.
            libc.signal(number, ctypes.c_void_p(int(signal.SIG_IGN)))
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: object) -> None:
        self._loop.call_soon_threadsafe(self._handle, number)

    def _handle(self, number: int) -> None:
        if not self.number:
            self.number = number
            self.decide(Haste.UNLIMITED if number == signal.SIGQUIT else Haste.LIMITED)
        elif number == signal.SIGINT:
            self.decide(Haste.AT_ONCE)
        elif number != signal.SIGQUIT:
            self.decide(Haste.LIMITED)

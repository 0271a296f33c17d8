"""The signals that stop a server or a batch run.

    signal                    requests in flight of a server      of a batch run
    SIGTERM, SIGHUP, SIGINT   may finish within the shutdown      end: they run again with --resume
                              timeout
    SIGQUIT                   may take as long as they need, until one of the signals above arrives
    SIGINT after any of them  are aborted at once                 the process is killed
    SIGUSR1, SIGUSR2          go on: the log is standard error, and there is no file to reopen

A second SIGTERM or SIGHUP changes nothing: shells, ``timeout`` and service managers may send a
signal both to a process and to its group. A SIGHUP that is ignored from the start (``nohup``) stays
ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
from collections.abc import Iterator

from jaxserve.program.stops import Haste, Stops

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
IGNORED = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Restores what signals do when the block exits, for a process that goes on."""
    before = {number: signal.getsignal(number) for number in (*STOPPING, *IGNORED)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class StopSignals(Stops):
    """Handles the signals of this process while its program runs in an event loop.

    Use it as a context manager, on the main thread. When it exits, the process is about to end:
    signals are ignored from then on, so that a late one changes neither the exit code nor the log.

    Args:
      interrupt_kills: whether a SIGINT kills this process once another signal but SIGQUIT has
        arrived, even if the event loop is blocked.

    Attributes:
      number: the number of the first signal that stops the program; 0: none has come.
    """

    def __init__(self, *, interrupt_kills: bool = False) -> None:
        super().__init__()
        self.number = 0
        self._interrupt_kills = interrupt_kills
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
        if self._interrupt_kills and number != signal.SIGQUIT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._loop.call_soon_threadsafe(self._handle, number)

    def _handle(self, number: int) -> None:
        if not self.number:
            self.number = number
            self.decide(Haste.UNLIMITED if number == signal.SIGQUIT else Haste.LIMITED)
        elif number == signal.SIGINT:
            self.decide(Haste.AT_ONCE)
        elif number != signal.SIGQUIT:
            self.decide(Haste.LIMITED)

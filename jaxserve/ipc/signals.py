"""The signals that a process of the server leaves to the main process."""

from __future__ import annotations

import signal

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def leave_signals_to_the_main_process() -> None:
    """Ignores the signals that stop a server; call it on the main thread of a child process.

    A terminal or a service manager sends them to every process, but the main process decides when
    the others end, after draining.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

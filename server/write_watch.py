"""Notices clients that are gone or do not read, and ends their connections."""

from __future__ import annotations

import asyncio
import logging
import socket

logger = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 4

IDLE_S, PROBE_INTERVAL_S, NUM_PROBES = 60, 15, 4
"""When TCP asks an idle peer whether it is still there, how often, and how many times."""


class WriteWatch:
    """Writes to a transport, and aborts it when nothing has been sent for too long.

    The timeout is one between two sends, not one of a whole response: a slow client may take as
    long as it likes. It also covers a closed transport that still has bytes to send.

    Args:
      transport: where `write` writes to. Every write must go through this object.
      loop: the event loop of the transport.
      timeout_s: seconds without progress after which the connection is aborted, and up to a quarter
        more.
    """

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None  # runs while there may be unsent bytes
        self._is_stopped = False
        self._num_written = 0
        self._num_sent = 0  # of the last progress, which was at `_progress_time`
        self._progress_time = 0.0

    def write(self, data: bytes) -> None:
        """Writes bytes. Like the method of a transport, it never waits.

        Has no effect after `stop`: some transports raise an error when the connection is lost.
        """
        if self._is_stopped:
            return
        self._transport.write(data)
        self._num_written += len(data)
        if self._timer is None:
            self._note_progress()
            self._start_timer()

    def stop(self) -> None:
        """Stops watching. Call it when the connection is lost."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        delay = self._timeout_s / CHECKS_PER_TIMEOUT
        self._timer = self._loop.call_later(delay, self._check)

    def _note_progress(self) -> None:
        num_sent = self._num_written - self._transport.get_write_buffer_size()
        if num_sent != self._num_sent or self._timer is None:
            self._num_sent, self._progress_time = num_sent, self._loop.time()

    def _check(self) -> None:
        self._note_progress()
        if self._num_sent == self._num_written:
            self._timer = None
        elif self._loop.time() - self._progress_time >= self._timeout_s:
            logger.info("a client has read nothing for %g s: disconnected", self._timeout_s)
            self._transport.abort()
        else:
            self._start_timer()


def probe_peer(transport: asyncio.BaseTransport, *, send_timeout_s: float) -> None:
    """Makes TCP end the connection of a peer that has vanished without closing it.

    An idle peer must answer probes, and sent bytes must be acknowledged, in both cases within the
    time of all probes or ``send_timeout_s`` seconds, whichever is longer. Options that a system
    does not have are left out.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience_s = max(IDLE_S + PROBE_INTERVAL_S * NUM_PROBES, send_timeout_s)
    options = {
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": PROBE_INTERVAL_S,
        "TCP_KEEPCNT": NUM_PROBES,
        "TCP_USER_TIMEOUT": round(patience_s * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""Logs when the process cannot open more files: every connection needs one."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
QUIET_S = 60.0
"""Seconds between two lines, at least."""

LIMITS = {errno.EMFILE: "this process", errno.ENFILE: "this machine"}


async def watch_open_files(
    *, interval_s: float = PROBE_INTERVAL_S, quiet_s: float = QUIET_S
) -> None:
    """Logs a line when the limit on open files is reached, until it is cancelled.

    The event loop closes further connections, and logs nothing.
    """
    loop = asyncio.get_running_loop()
    quiet_until = loop.time()
    while True:
        await asyncio.sleep(interval_s)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in LIMITS:
                raise
            if loop.time() >= quiet_until:
                quiet_until = loop.time() + quiet_s
                _warn(LIMITS[error.errno])


def _warn(whose: str) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    logger.warning(
        "%s cannot open more files (its own limit is %d): new connections are closed at once; "
        "raise the limit (ulimit -n, LimitNOFILE), or limit the connections in front of the server",
        whose,
        soft,
    )

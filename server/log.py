"""The log of a process of the server."""

from __future__ import annotations

import logging


def set_up_logging(level: int | str, *, who: str = "") -> None:
    """Logs to the standard error output from a level on.

    ``who`` names the process in every line; "" in the main process.
    """
    name = f"{who}: " if who else ""
    logging.basicConfig(
        level=level, format=f"%(levelname)s %(asctime)s {name}%(name)s: %(message)s"
    )
    # The messages of these two repeat those of the console.
    for repeating in ("uvicorn.error", "asyncio"):
        logging.getLogger(repeating).setLevel(max(logging.WARNING, logging.getLogger().level))

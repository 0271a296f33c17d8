"""The messages between the main process and a front process, where a server has several fronts.

The main process starts the engines and restarts them. It tells every front which engine processes
there are; each front then talks to them itself, with `ipc.messages`.
"""

from __future__ import annotations

import msgspec

from jaxserve.ipc.messages import Ready, StepStats


class EngineUp(msgspec.Struct, tag="engine-up", array_like=True, frozen=True):
    """An engine process can serve. It replaces the process of the same engine that went down.

    Attributes:
      process: the number of the process. Every start of an engine gets a new one.
      requests_address: the socket on which the process receives requests.
      events_address: the socket that the front binds, to receive the events of the process.
      ready: the resolved settings of the engine, and its index.
      stats: the totals of the engine before this process.
    """

    process: int
    requests_address: str
    events_address: str
    ready: Ready
    stats: StepStats


class EngineDown(msgspec.Struct, tag="engine-down", array_like=True, frozen=True):
    """An engine process is dead.

    Attributes:
      process: the number that its `EngineUp` had.
      message: the reason.
      running_ids: the requests of all fronts that it was running, as the engine named them; None if
        it could not.
    """

    process: int
    message: str
    running_ids: list[str] | None


class EnginesGone(msgspec.Struct, tag="engines-gone", array_like=True, frozen=True):
    """No engine is left, and none will be restarted. ``message`` is the reason."""

    message: str

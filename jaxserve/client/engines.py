"""The engines of an `EngineClient`, whoever runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxserve.client.replica import Replica
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.ipc.messages import Ready, StepOutputs


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Called with what happens to the engines.

    Attributes:
      outputs: an engine has ended a step, or sent a heartbeat.
      ready: an engine can serve, for the first time or after a restart.
      death: an engine is dead. Its requests are still in `Replica.requests`. Every replica of this
        call was one of ``ready`` before.
    """

    outputs: Callable[[StepOutputs], None] = _ignore
    ready: Callable[[Replica], None] = _ignore
    death: Callable[[Replica], None] = _ignore


class Engines(Protocol):
    """The engines of a server, run by this process (`Supervisor`) or not (`AttachedEngines`)."""

    @property
    def reader(self) -> int:
        """The number of this process as a reader; see `ipc.messages`."""
        ...

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """The current replica of each engine, by its index. An engine that never ran has none."""
        ...

    @property
    def readies(self) -> Mapping[int, Ready]:
        """The resolved settings with which each engine started first, by its index."""
        ...

    @property
    def gone(self) -> asyncio.Future[EngineDeadError]:
        """Done, with the reason, when no engine is left and none will be restarted."""
        ...

    def watch(self, callbacks: Callbacks) -> None:
        """Sets the callbacks. Call it once, before any engine is ready."""
        ...

    async def stop(self, error: JaxserveError, *, timeout_s: float) -> None:
        """Ends the use of the engines: every replica is dead then, with the reason ``error``.

        An engine that is told to exit has ``timeout_s`` seconds for it.
        """
        ...

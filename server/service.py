"""The life of a server process: it starts, serves until it is stopped, drains and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from jaxserve.errors import JaxserveError
from jaxserve.ipc.control import FrontUp
from jaxserve.ipc.messages import StepStats
from jaxserve.program.stops import Stops


class Service(Protocol):
    """A `serving.Front` in this process, or the processes of several."""

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The latest state of each engine, by its index, once `start` has returned."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Completions in flight."""
        ...

    @property
    def error(self) -> JaxserveError | None:
        """Why the service cannot go on; None if it can."""
        ...

    async def start(self) -> FrontUp:
        """Returns as soon as requests can be served. Raises JaxserveError if that is impossible."""
        ...

    def ends(self) -> Iterable[asyncio.Future]:
        """Returns futures, any of which is done when the service cannot go on."""
        ...

    def refuse(self, stops: Stops) -> None:
        """Refuses new requests from now on."""
        ...

    async def drain(self, stops: Stops) -> None:
        """Returns when the requests in flight have ended, or had the time that ``stops`` gives."""
        ...

    async def close(self, *, at_once: bool) -> None:
        """Ends everything, even after a start that failed or was cancelled.

        ``at_once``: nothing gets time to end by itself.
        """
        ...


async def serve_until_stopped(
    service: Service, stops: Stops, *, on_stop: Callable[[], None]
) -> None:
    """Waits until a service that has started must stop, and drains it.

    ``on_stop`` is called when new requests are refused.

    Raises:
      JaxserveError: the service stopped because it could not go on.
    """
    await asyncio.wait({stops.stop, *service.ends()}, return_when=asyncio.FIRST_COMPLETED)
    service.refuse(stops)
    on_stop()
    await service.drain(stops)
    if service.error is not None and not stops.stop.done():
        raise service.error

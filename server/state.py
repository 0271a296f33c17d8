"""The state of a server: starting, serving or draining."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from jaxserve.config import EngineConfig
from jaxserve.errors import UnavailableError
from jaxserve.front.counts import Counts, LocalCounts
from jaxserve.front.metrics import num_cells
from jaxserve.front.text_engine import TextEngine


class ServerState:
    """The state that all routes share. The code that runs the application updates it.

    Args:
      text_engine: serves requests; None until the engines have started.
      counts: what the processes of the server count; None: those of ``text_engine``, or new ones.

    Attributes:
      text_engine: as above.
      counts: as above. The text engine that is set later must have the same.
      phase: the current phase of the start, for messages.
      draining: requests in flight finish, new ones are refused.
      aborting: requests in flight have been aborted, because the server stops.
      created: Unix time of the start, in seconds.
      config: the settings of the engines, shown by /server_info.
      api_server_count: the number of fronts, shown by /server_info.
      abort_elsewhere: aborts the requests of the other fronts that have this ID, or all with None,
        and returns the number of completions; None: there are no other fronts.
    """

    def __init__(
        self, text_engine: TextEngine | None = None, *, counts: Counts | None = None
    ) -> None:
        self.text_engine = text_engine
        if counts is None:
            counts = LocalCounts(num_cells(1)) if text_engine is None else text_engine.counts
        self.counts = counts
        self.phase = "starting"
        self.draining = False
        self.aborting = False
        self.created = int(time.time())
        self.config: EngineConfig | None = None
        self.api_server_count = 1
        self.abort_elsewhere: Callable[[str | None], Awaitable[int]] | None = None

    def serving(self) -> TextEngine:
        """Returns the text engine for a new request. Raises UnavailableError."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self.text_engine is None:
            raise UnavailableError(f"the server is starting ({self.phase}); try again later")
        return self.text_engine

    def check_whole(self) -> None:
        """Raises UnavailableError if a reply that is ready may have been cut by the shutdown."""
        if self.aborting:
            raise UnavailableError("the server has shut down before the reply was complete")

    def check_health(self) -> None:
        """Raises UnavailableError or EngineDeadError unless every engine can serve."""
        self.serving().engine.check_health()

    async def abort(self, request_id: str | None) -> int:
        """Aborts the requests of the whole server that have this ID, or all with None.

        Returns the number of completions. Raises UnavailableError.
        """
        here = self.serving().abort(request_id)
        if self.abort_elsewhere is None:
            return here
        return here + await self.abort_elsewhere(request_id)

    def load(self) -> int:
        """Returns the number of completions of the server in flight."""
        return 0 if self.text_engine is None else self.text_engine.num_in_flight

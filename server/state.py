"""How far a server is: starting, serving, on its way out."""

from __future__ import annotations

import time

from jaxserve.config import EngineConfig
from jaxserve.errors import JaxserveError
from jaxserve.front.text_engine import TextEngine


class UnavailableError(JaxserveError):
    """The server does not serve requests: not yet, or no more."""


class ServerState:
    """What the routes share. An application has one, and whoever runs it moves it on.

    Attributes:
      text_engine: what serves requests; None while it is being made.
      phase: what is going on while there is no front end, for people.
      draining: requests in flight are finished, new ones are refused.
      created: Unix time at which the server was started.
      config: what the engines were told, to be shown.
    """

    def __init__(self, text_engine: TextEngine | None = None) -> None:
        self.text_engine = text_engine
        self.phase = "starting"
        self.draining = False
        self.created = int(time.time())
        self.config: EngineConfig | None = None

    def serving(self) -> TextEngine:
        """The front end for a new request. Raises UnavailableError."""
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self.text_engine is None:
            raise UnavailableError(f"the server is starting ({self.phase}); try again later")
        return self.text_engine

    def check_health(self) -> None:
        """Raises UnavailableError or EngineDeadError unless every engine can serve."""
        self.serving().engine.check_health()

    def load(self) -> int:
        """Answers in flight."""
        return 0 if self.text_engine is None else self.text_engine.num_in_flight

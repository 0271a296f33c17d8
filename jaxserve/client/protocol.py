"""The part of an engine that front-ends need, however and wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from jaxserve.ipc.messages import Ready, RequestOutput, StepStats, Submit


class Engine(Protocol):
    """Turns prompts into tokens. Validates nothing: requests have been checked at the door."""

    @property
    def ready(self) -> Ready:
        """What the engine settled on when it started; with replicas, the first one."""
        ...

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The newest state of each engine, by its index."""
        ...

    def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request and yields what it generates, as it comes.

        The request is on its way when the first item is asked for. The last output, and no other,
        has a finish reason; outputs that were not taken in time arrive merged into one. Closing the
        generator before that (``aclose``, best by `contextlib.aclosing`) aborts the request.

        Args:
          request: its id is unlike that of any request in flight, or that was aborted a moment ago:
            what was still on its way to that one would be taken for this one's.

        Raises:
          InvalidRequestError: the id is already in use.
          EngineDeadError: the engine that ran the request is gone, or none is left.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; their last output says so. Unknown ids are ignored."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError if an engine is dead, or holds requests and does not move."""
        ...

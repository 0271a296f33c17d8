"""The engine interface of the front, wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from jaxserve.ipc.messages import Ready, RequestOutput, StepStats, Submit


class Engine(Protocol):
    """Generates output tokens for prompts of token IDs.

    An engine does not validate requests: the front has done so before `generate`.
    """

    @property
    def ready(self) -> Ready:
        """The resolved settings of the engine, or of the first engine if there are several."""
        ...

    @property
    def stats(self) -> Mapping[int, StepStats]:
        """The latest state of each engine, by its index."""
        ...

    def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request and yields its outputs.

        The request is sent when the caller asks for the first item. Exactly the last output has a
        finish reason. Outputs that the caller does not read in time arrive merged into one. Closing
        the generator earlier (``aclose``, best through `contextlib.aclosing`) aborts the request.

        Args:
          request: its ID must not be that of a request in flight, or of one just aborted, whose
            outputs may still arrive.
          on_ended: called once when the engine has nothing more to do for the request, because it
            finished, failed or was aborted. A caller that is slow to read may not have read the
            last output yet. Not called if the request was never sent.

        Raises:
          InvalidRequestError: the ID is in use.
          EngineDeadError: the engine of the request died, or no engine is alive.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts requests: their last output has reason ABORT. Ignores unknown IDs."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError if an engine is dead or stuck."""
        ...

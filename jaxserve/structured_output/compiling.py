"""Holds requests while their grammars are compiled, so that other requests run meanwhile."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from jaxserve.core.plan import Constraint
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import Submit

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 30.0
"""Maximum time to compile the grammar of a request."""

Compile = Callable[[Submit], Future[Constraint]]
"""Starts to compile the grammar of a request."""


@dataclass(slots=True)
class _Entry:
    """A request and its compilation. ``since_s``: the time of the first `take` that saw it."""

    submit: Submit
    future: Future[Constraint]
    since_s: float | None = None


class CompilingRequests:
    """Requests that wait for their `Constraint`.

    Args:
      compile: starts to compile the grammar of a request; called once for each request.
    """

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterates over the IDs of the requests."""
        return iter(self._entries)

    def add(self, submit: Submit) -> None:
        """Adds a request. Its ID must not be that of another waiting request."""
        assert submit.request_id not in self._entries
        self._entries[submit.request_id] = _Entry(submit, self._compile(submit))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Removes requests. Unknown IDs are ignored."""
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                entry.future.cancel()

    def take(self, now: float) -> tuple[list[tuple[Submit, Constraint]], list[tuple[str, str]]]:
        """Removes and returns the requests whose compilation has ended.

        Args:
          now: seconds; the time limit of a request counts from the first call that sees it.

        Returns:
          (the requests with a constraint, in the order of their arrival; the IDs of the requests
          whose grammar cannot be compiled or takes too long to compile, each with the reason).
        """
        ready: list[tuple[Submit, Constraint]] = []
        failed: list[tuple[str, str]] = []
        for request_id, entry in list(self._entries.items()):
            if entry.since_s is None:
                entry.since_s = now
            if entry.future.done():
                error = entry.future.exception()
                if error is None:
                    ready.append((entry.submit, entry.future.result()))
                else:
                    if not isinstance(error, InvalidRequestError):
                        logger.error("compiling the grammar of %s", request_id, exc_info=error)
                    failed.append((request_id, f"its grammar cannot be compiled: {error}"))
            elif now - entry.since_s > COMPILE_TIMEOUT_S:
                entry.future.cancel()
                reason = f"its grammar is not compiled after {COMPILE_TIMEOUT_S:.0f} s"
                failed.append((request_id, reason))
            else:
                continue
            del self._entries[request_id]
        return ready, failed

    def wait(self, timeout_s: float) -> None:
        """Waits until a compilation has ended, at most ``timeout_s``."""
        futures = [entry.future for entry in self._entries.values()]
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

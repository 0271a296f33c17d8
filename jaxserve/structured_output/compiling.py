"""Requests whose grammar is being compiled. Others go on meanwhile."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from jaxserve.core.plan import Constraint
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import Submit

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 30.0
"""How long a request waits for its grammar."""

Compile = Callable[[Submit], Future[Constraint]]
"""Starts to make the constraint of a request."""


@dataclass(slots=True)
class _Entry:
    submit: Submit
    future: Future[Constraint]
    since_s: float | None = None


class CompilingRequests:
    """Holds requests until their constraint is there.

    Args:
      compile: called once for each request.
    """

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, submit: Submit) -> None:
        """Takes a request, whose id is not in use here."""
        assert submit.request_id not in self._entries
        self._entries[submit.request_id] = _Entry(submit, self._compile(submit))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops requests. Unknown ids are ignored."""
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                entry.future.cancel()

    def take(self, now: float) -> tuple[list[tuple[Submit, Constraint]], list[str]]:
        """Gives out the requests that have waited enough.

        Args:
          now: seconds; the time of a request counts from the first call that sees it.

        Returns:
          (those that are ready, in the order of their arrival; the ids of those that have no
          constraint, because it cannot be made or takes too long).
        """
        ready: list[tuple[Submit, Constraint]] = []
        failed: list[str] = []
        for request_id, entry in list(self._entries.items()):
            if entry.since_s is None:
                entry.since_s = now
            if entry.future.done():
                error = entry.future.exception()
                if error is None:
                    ready.append((entry.submit, entry.future.result()))
                else:
                    known = isinstance(error, InvalidRequestError)
                    cause = None if known else error
                    logger.error("no grammar for request %s: %s", request_id, error, exc_info=cause)
                    failed.append(request_id)
            elif now - entry.since_s > COMPILE_TIMEOUT_S:
                logger.error("the grammar of request %s takes too long to compile", request_id)
                entry.future.cancel()
                failed.append(request_id)
            else:
                continue
            del self._entries[request_id]
        return ready, failed

    def wait(self, timeout_s: float) -> None:
        """Waits until one of them is ready, but no longer than ``timeout_s``."""
        futures = [entry.future for entry in self._entries.values()]
        concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

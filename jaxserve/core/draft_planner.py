"""Gives running requests their draft tokens, and counts how many are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.plan import ScheduledRequest
from jaxserve.core.request import Request
from jaxserve.core.speculation import Speculation


class DraftPlanner:
    """Plans the drafts of each step. The totals only grow.

    Args:
      settings: of the engine; None: no request gets drafts.

    Attributes:
      total_drafts: steps of requests that had proposed drafts.
      total_draft_tokens: drafts that were proposed.
      accepted_per_position: drafts that were accepted, as the first, second, ... of their step.
    """

    def __init__(self, settings: Speculation | None) -> None:
        self._settings = settings
        self.total_drafts = 0
        self.total_draft_tokens = 0
        self.accepted_per_position = [0] * (0 if settings is None else settings.max_drafts)

    def plan(self, running: Sequence[Request], *, num_new_rows: int, budget: int) -> dict[str, int]:
        """Returns the number of drafts of each request that gets any, by its ID.

        Args:
          running: all running requests; each has at least one token in the step.
          num_new_rows: requests that the step may admit.
          budget: the most tokens in the step.
        """
        if self._settings is None:
            return {}
        candidates = [
            (request.id, request.drafts, most)
            for request in running
            if request.drafts is not None and (most := _max_drafts(request)) > 0
        ]
        num_rows = len(running)
        free_rows = self._settings.max_num_rows - num_rows - num_new_rows
        counts = self._settings.num_drafts(
            [record for _, record, _ in candidates],
            num_rows=num_rows,
            most=min(free_rows, budget - num_rows),
        )
        planned: dict[str, int] = {}
        for (request_id, record, most), count in zip(candidates, counts, strict=True):
            if count > 0:
                planned[request_id] = min(count, most)
            else:
                record.skip()
        return planned

    def add(
        self, request: Request, scheduled: ScheduledRequest, num_proposed: int, num_accepted: int
    ) -> None:
        """Counts the result of a step in which the request could have drafts."""
        assert request.drafts is not None
        request.drafts.add(scheduled.num_drafts, num_accepted)
        self.total_drafts += num_proposed > 0
        self.total_draft_tokens += num_proposed
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


def _max_drafts(request: Request) -> int:
    """Returns the most drafts that the next step of a request can use; may be negative."""
    if request.num_tokens - request.num_computed_tokens != 1:
        return 0  # a prompt
    if request.num_output_tokens < request.params.min_tokens:
        return 0  # end tokens are blocked, on the host, for some of the next tokens
    return request.max_num_tokens - 1 - request.num_tokens

"""A step while the scheduler builds it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.plan import ScheduledRequest, StepPlan, TableUpdate
from jaxserve.core.request import Request


class StepDraft:
    """Collects the scheduled requests of one step, within a budget of tokens.

    `add` advances the request as if the step had already run. The device runs steps in order, so
    the next step can be planned before this one has ended.

    Attributes:
      budget: tokens that the step still has room for.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._speculates = False
        self._one_token: list[tuple[Request, ScheduledRequest]] = []
        self._longer: list[tuple[Request, ScheduledRequest]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request has been added."""
        return not self._one_token and not self._longer

    def add(
        self,
        request: Request,
        num_tokens: int,
        table_updates: Sequence[TableUpdate],
        *,
        is_new: bool = False,
    ) -> None:
        """Adds the next ``num_tokens`` tokens of a running request.

        ``table_updates`` are the changes of its block tables since its last step. ``is_new`` tells
        whether the request has just been admitted.
        """
        assert request.row is not None
        assert request.num_drafts_in_flight == 0, "the host must know the position"
        assert request.num_unknown_tokens <= 1, "at most two steps may be in flight"
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens
        scheduled = ScheduledRequest(
            request_id=request.id,
            row=request.row,
            is_new=is_new,
            start=start,
            num_tokens=num_tokens,
            token_ids=request.token_ids[start:end],
            table_updates=table_updates,
            samples=samples,
            params=request.params,
            eos_token_id=request.eos_token_id,
            num_prompt_tokens=request.num_prompt_tokens,
            known_token_ids=request.token_ids,
            num_unknown_tokens=request.num_unknown_tokens,
            constraint=request.constraint,
        )
        request.num_computed_tokens = end
        request.num_unknown_tokens += samples
        request.is_speculating = False
        self.budget -= num_tokens
        (self._one_token if num_tokens == 1 else self._longer).append((request, scheduled))

    def add_last_token(
        self, request: Request, num_drafts: int, table_updates: Sequence[TableUpdate]
    ) -> None:
        """Adds the last token of a running request and up to ``num_drafts`` drafts after it.

        The block tables must cover all of them. ``table_updates``: as for `add`.
        """
        if num_drafts or request.num_drafts_in_flight:
            self._add_speculating(request, num_drafts, table_updates)
        else:
            self.add(request, 1, table_updates)

    def _add_speculating(
        self, request: Request, num_drafts: int, table_updates: Sequence[TableUpdate]
    ) -> None:
        """Adds a request whose position only the device knows, or that gets drafts."""
        assert request.row is not None
        start, num_tokens = request.num_computed_tokens, 1 + num_drafts
        assert start + 1 == request.num_tokens, "all tokens but the last must be computed"
        scheduled = ScheduledRequest(
            request_id=request.id,
            row=request.row,
            is_new=False,
            start=start,
            num_tokens=num_tokens,
            token_ids=(),
            table_updates=table_updates,
            samples=True,
            params=request.params,
            eos_token_id=request.eos_token_id,
            num_prompt_tokens=request.num_prompt_tokens,
            known_token_ids=request.token_ids,
            num_unknown_tokens=request.num_unknown_tokens,
            speculates=True,
            starts_speculation=not request.is_speculating,
            num_drafts=num_drafts,
        )
        request.num_computed_tokens += num_tokens
        request.num_unknown_tokens += num_tokens
        request.num_drafts_in_flight += num_drafts
        request.is_speculating = self._speculates = True
        self.budget -= num_tokens
        self._one_token.append((request, scheduled))

    def finish(self, step_id: int) -> tuple[StepPlan, Sequence[Request]]:
        """Returns the plan, and the requests that ``plan.scheduled`` belongs to, aligned."""
        drafted = self._one_token + self._longer
        plan = StepPlan(step_id, tuple(scheduled for _, scheduled in drafted), self._speculates)
        return plan, [request for request, _ in drafted]

"""The host's state of one request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxserve.core.constraint import Constraint
from jaxserve.ipc.messages import FinishReason, Submit, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request is. A preempted request is waiting again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its arrival to its end. Changed only by the scheduler.

        | prompt ............ | output ........... | unknown |
        0              num_prompt_tokens    len(token_ids)   num_tokens
        | computed, or being computed by a step in flight | to do |
        0                                 num_computed_tokens

    There is no prefill and no decode phase: ``num_computed_tokens`` catches up with
    ``num_tokens``, and each time it does, a token is sampled.

    Attributes:
      order: arrivals are numbered; lower came earlier.
      num_prompt_tokens: tokens below this position came with the prompt, the rest is output, also
        output of an engine that died.
      max_num_tokens: the request ends by length when it has this many tokens, prompt included.
      token_ids: every token that the host knows, prompt first.
      num_unknown_tokens: tokens after those that steps in flight are sampling.
      row: its row in the per-request device arrays while it runs.
      block_ids: its block table: blocks of the KV cache in the order of their positions.
      scheduled_s: when it first ran.
      constraint: what its output has to obey, or None.
      prompt_logprobs: what is known of those that were asked for, from the first token of the
        prompt on, whose entry is None; None if they were not asked for or have been handed over.
      pooled: of a request with ``params.pooling``, the sum of hidden states so far.
    """

    id: str
    params: SamplingParams
    eos_token_id: int | None
    priority: int
    arrival_s: float
    order: int
    num_prompt_tokens: int
    max_num_tokens: int
    token_ids: list[int]
    stop_token_ids: frozenset[int]
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_unknown_tokens: int = 0
    row: int | None = None
    block_ids: list[int] = field(default_factory=list)
    scheduled_s: float | None = None
    constraint: Constraint | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: Sequence[float] = ()

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        order: int,
        context_length: int,
        constraint: Constraint | None = None,
    ) -> Request:
        """The state of a request that has just arrived and that may grow to ``context_length``."""
        params = submit.params
        if submit.num_prior_tokens > 0 and params.prompt_logprobs is not None:
            # They came with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        num_prompt_tokens = len(submit.prompt_token_ids) - submit.num_prior_tokens
        max_num_tokens = context_length
        if params.max_tokens is not None:
            max_num_tokens = min(context_length, num_prompt_tokens + params.max_tokens)
        if params.pooling is not None:
            max_num_tokens = num_prompt_tokens + 1
        return cls(
            id=submit.request_id,
            params=params,
            eos_token_id=submit.eos_token_id,
            priority=submit.priority,
            arrival_s=submit.arrival_s,
            order=order,
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=max_num_tokens,
            token_ids=list(submit.prompt_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids),
            constraint=constraint,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, with those that are known to the device only."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Takes a sampled token; returns why the request ends with it, if it does, and the stop id.

        An end token or stop id on the very last allowed token counts as a stop, not as length.
        """
        self.token_ids.append(token_id)
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id == self.eos_token_id:
                return FinishReason.STOP, None
            if token_id in self.stop_token_ids:
                return FinishReason.STOP, token_id
        if self.constraint is not None:
            finish_reason = self.constraint.accept(token_id)
            if finish_reason is not None:
                return finish_reason, None
        if len(self.token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Takes what a step found about the tokens after position ``start``.

        After a preemption steps find again what is known already.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += entries[len(self.prompt_logprobs) - start - 1 :]

    def hand_over_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """All of them, if they were asked for; they are not computed again."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        if found is not None:
            self.params = msgspec.structs.replace(self.params, prompt_logprobs=None)
        return found

    def add_pooled(self, start: int, vector: Sequence[float]) -> None:
        """Takes what a step computed for the tokens from position ``start`` on.

        After a preemption steps begin with the first token again.
        """
        if start == 0 or self.params.pooling == "last":
            self.pooled = vector
        else:
            self.pooled = [a + b for a, b in zip(self.pooled, vector, strict=True)]

    def embedding(self) -> list[float]:
        """The vector that the request asked for, when its prompt has been computed."""
        count = self.num_prompt_tokens if self.params.pooling == "mean" else 1
        return [value / count for value in self.pooled]

"""The state of one request on the host, and the limits on its length."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxserve.core.plan import Constraint
from jaxserve.core.speculation import DraftRecord
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


class Status(enum.Enum):
    """The stage of a request. A preempted request is waiting again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One completion, from arrival to finish. Only the scheduler changes it.

        | prompt ............ | output ........... | unknown |
        0              num_prompt_tokens    len(token_ids)   num_tokens
        | computed, or being computed by a step in flight | to do |
        0                                 num_computed_tokens

    There is no prefill phase and no decode phase: ``num_computed_tokens`` catches up with
    ``num_tokens``, and every time it does, the step samples.

    While drafts are in flight, ``num_unknown_tokens`` counts all of them, so that it,
    ``num_tokens`` and ``num_computed_tokens`` are upper bounds. `settle` lowers them by the
    rejected drafts, whose slots the next step overwrites.

    Attributes:
      id: unique among the requests of the engine.
      params: the sampling parameters; ``seed`` is set.
      eos_token_id: the token that ends the request without a stop reason, or None.
      priority: used by the priority policy; lowest first.
      arrival_s: when the request reached the front, in seconds of `time.monotonic`.
      order: place in the order of arrival at this engine, from 0.
      num_prompt_tokens: positions below this hold the prompt, the rest is output. Output that an
        earlier engine generated before it died counts as output.
      max_num_tokens: the request ends with reason LENGTH at this many tokens, prompt included.
      token_ids: all tokens that the host knows, prompt first.
      stop_token_ids: tokens that end the request, each as its own stop reason.
      status: waiting, running or finished.
      num_computed_tokens: tokens whose keys and values are in the cache or being computed by a
        step in flight.
      num_unknown_tokens: tokens after ``token_ids`` that steps in flight are sampling.
      num_drafts_in_flight: how many of them are sampled only if a draft is accepted.
      row: the engine row while the request runs, else None.
      block_tables: one for each group of layers: blocks of the KV cache in the order of their
        positions, 0 for a block that was given back. Empty unless the request runs.
      tables_fit: the block tables need no change while ``num_tokens`` is at most this.
      scheduled_s: when the request was first admitted, on the clock of ``arrival_s``; None before.
      constraint: restricts the output, or None.
      prompt_logprobs: one entry per prompt token scored so far; entry 0 is None, since nothing
        precedes the first token. None if not requested, or already returned.
      pooled: with ``params.pooling``, the sum of the hidden states so far ("mean"), or the hidden
        state of the last token ("last").
      is_speculating: whether the latest scheduled step speculated, so that the device knows the
        tokens of the row.
      drafts: estimates whether its drafts are accepted; None if it must not have drafts.
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
    num_drafts_in_flight: int = 0
    row: int | None = None
    block_tables: list[list[int]] = field(default_factory=list[list[int]])
    tables_fit: int = 0
    scheduled_s: float | None = None
    constraint: Constraint | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: Sequence[float] = ()
    is_speculating: bool = False
    drafts: DraftRecord | None = None

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        order: int,
        context_length: int,
        constraint: Constraint | None = None,
        speculates: bool = False,
    ) -> Request:
        """Creates the state of a request that has just arrived.

        Args:
          submit: the request, validated by the front.
          order: place in the order of arrival at this engine, from 0.
          context_length: the most tokens that the request can have.
          constraint: restricts the output, or None.
          speculates: whether the engine does.
        """
        params = submit.params
        if submit.num_prior_tokens > 0 and params.prompt_logprobs is not None:
            # The engine that died had returned them with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        num_prompt_tokens = len(submit.prompt_token_ids) - submit.num_prior_tokens
        max_num_tokens = context_length
        if params.max_tokens is not None:
            max_num_tokens = min(context_length, num_prompt_tokens + params.max_tokens)
        if params.pooling is not None:
            # The request ends with the first sampled token, which is dropped.
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
            drafts=DraftRecord() if speculates and _can_speculate(params, constraint) else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including those that only the device knows."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def may_end(self) -> bool:
        """Whether the tokens in flight may reach the length limit. Drafts may be rejected."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def least_computed_tokens(self) -> int:
        """The computed tokens if all drafts in flight are rejected."""
        return self.num_computed_tokens - self.num_drafts_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Appends a sampled token.

        Returns the finish reason if the request ends with this token, else None, and the stop token
        ID that ended it, else None. An end token or stop token at the very last allowed position
        finishes with STOP, not LENGTH.
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

    def settle(self, num_planned: int, num_sampled: int) -> None:
        """Replaces the upper bounds of a step by what it sampled; the tokens are appended next.

        Args:
          num_planned: the most tokens that the step could sample: 1 + its drafts.
          num_sampled: the tokens that it sampled.
        """
        self.num_unknown_tokens -= num_planned
        self.num_drafts_in_flight -= num_planned - 1
        if self.status is Status.RUNNING:
            # A preempted request starts again at 0.
            self.num_computed_tokens -= num_planned - num_sampled

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Adds the log probabilities of the prompt tokens from position ``start + 1`` on.

        After a preemption, steps score prompt tokens again; known entries are skipped.
        """
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += entries[len(self.prompt_logprobs) - start - 1 :]

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Returns the requested prompt log probabilities once, and stops requesting them."""
        entries, self.prompt_logprobs = self.prompt_logprobs, None
        if entries is not None:
            self.params = msgspec.structs.replace(self.params, prompt_logprobs=None)
        return entries

    def add_pooled(self, start: int, vector: Sequence[float]) -> None:
        """Adds the pooled hidden states of a step that computed tokens from ``start`` on.

        After a preemption, steps start again at position 0, which resets the sum.
        """
        if start == 0 or self.params.pooling == "last":
            self.pooled = vector
        else:
            self.pooled = [a + b for a, b in zip(self.pooled, vector, strict=True)]

    def embedding(self) -> tuple[float, ...]:
        """Returns the requested vector. The whole prompt must have been computed."""
        count = self.num_prompt_tokens if self.params.pooling == "mean" else 1
        return tuple(value / count for value in self.pooled)


def _can_speculate(params: SamplingParams, constraint: Constraint | None) -> bool:
    """Whether tokens depend on the tokens before them through the model only.

    Penalties, bad words, grammars and declared stages of the sampler also depend on them on the
    host, which does not know drafts.
    """
    return (
        constraint is None
        and params.pooling is None
        and not params.has_penalties
        and not params.bad_words_token_ids
        and not params.extra_args
    )


def check_length(num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int) -> None:
    """Raises unless a request can run to its end on an otherwise empty engine.

    The front and the engine share this function, so a client gets the same message from both.

    Args:
      num_prompt_tokens: tokens of the prompt.
      max_tokens: requested output tokens; None for the rest of the context, 0 for a pooling
        request.
      max_model_len: the most tokens of one request. A request of this length fits the KV cache.

    Raises:
      InvalidRequestError: the prompt is empty.
      ContextLengthError: prompt and output do not fit the context. ``param`` is "prompt" if the
        prompt alone is too long, or leaves no room for the first output token; else "max_tokens".
    """
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty; expected at least 1 token", param="prompt")
    limit = f"the maximum context length is {max_model_len} tokens"
    if max_tokens == 0:
        if num_prompt_tokens > max_model_len:
            raise ContextLengthError(
                f"{limit}, but the prompt has {num_prompt_tokens} tokens", param="prompt"
            )
        return
    if num_prompt_tokens + 1 > max_model_len:
        raise ContextLengthError(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens, which leaves no room for "
            f"the output; shorten the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthError(
            f"{limit}, but {num_prompt_tokens + max_tokens} were requested ({num_prompt_tokens} "
            f"in the prompt, {max_tokens} for the output); shorten the prompt or ask for at most "
            f"{max_model_len - num_prompt_tokens} tokens",
            param="max_tokens",
        )

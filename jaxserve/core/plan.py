"""The interface between scheduler and runner: the plan of a step, its result, and protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxserve.ipc.messages import Decision, FinishReason, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that shape the device arrays and bound the scheduler.

    Attributes:
      max_model_len: the most tokens of one request, prompt and output together.
      block_size: slots in a block of the KV cache.
      num_blocks: blocks in the KV cache, including block 0, which no request ever holds.
      max_num_seqs: the most requests that run at the same time; the number of rows.
      max_num_batched_tokens: the most tokens in one step.
      max_drafts: the most draft tokens of a request in one step; 0 without speculation.
      decisions: the sizes of the context and the KV cache with reasons, shown to the user.
      windows: the window of each group of layers in the KV cache; see `CacheGroups`.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_drafts: int = 0
    decisions: tuple[Decision, ...] = ()
    windows: tuple[int | None, ...] = (None,)

    @property
    def max_num_rows(self) -> int:
        """The most rows of a step. Drafts take rows that running requests leave free."""
        return max(self.max_num_seqs, 1 + self.max_drafts)


class Constraint(Protocol):
    """Restricts the tokens of one request; implemented by grammars.

    Methods never raise. An internal error ends the request that the constraint belongs to, and no
    other.
    """

    def fill_mask(self, mask: Any) -> None:
        """Writes the set of tokens that may come next.

        Args:
          mask: numpy u32[ceil(V / 32)], overwritten; token 32 w + b is bit b of word w. At least
            one bit is set afterwards. All bits are set if the request ends with the next token,
            whichever it is.
        """
        ...

    @property
    def error(self) -> str | None:
        """Why the request cannot continue, for the user; None if it can."""
        ...

    def accept(self, token_id: int) -> FinishReason | None:
        """Advances by the sampled token.

        Returns None to continue, STOP if the output is complete with this token, and ERROR if the
        request cannot continue.
        """
        ...


class TableUpdate(NamedTuple):
    """New entries of a block table.

    Attributes:
      group: the group of layers whose block table changes.
      start: index of the first entry in the table.
      block_ids: the blocks of the entries in order: blocks that are appended to the table, or only
        zeros in place of blocks that were given back.
    """

    group: int
    start: int
    block_ids: Sequence[int]


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request in one step: positions ``[start, start + num_tokens)``.

        0 ........ start ................ start + num_tokens ......... tokens so far
        | computed | computed in this step | left for later steps      |

    A request that `speculates` computes its last token and up to ``num_drafts`` draft tokens after
    it, each in a row of its own, and samples after each of them. Steps in flight may still reject
    drafts, so only the device knows the position of the last token; ``start`` is the largest that
    it can have.

    A msgspec struct, because every step creates one per request and structs are cheap to create.

    Attributes:
      request_id: the request.
      row: the engine row of the request, in ``[0, max_num_seqs)``. A request keeps its row from
        admission until it finishes or is preempted.
      is_new: whether the request was admitted in this step, so that the row may still hold the data
        of an earlier request.
      start: position of the first token.
      num_tokens: number of tokens, at least 1.
      token_ids: the token IDs at these positions. Empty if the host does not know the only token
        yet: the device has it, as the token that this row sampled last. Empty if the request
        speculates.
      table_updates: changes of the block tables of the row since its last step; often none.
      samples: whether these are the last tokens so far, so that this step samples the token at
        position ``start + num_tokens``.
      params: the sampling parameters of the request; ``seed`` is set.
      eos_token_id: the end token, which is not sampled before ``params.min_tokens``; or None.
      num_prompt_tokens: positions below this hold the prompt; the rest is output.
      known_token_ids: all tokens of the request that the host knows, prompt first. The scheduler
        appends to this list after the step has started, so read it only while building the step.
      num_unknown_tokens: tokens after ``known_token_ids`` that earlier steps sampled and the host
        does not know yet: 0 or 1, or if the request speculates, the most that there can be.
      constraint: restricts the sampled token, or None.
      speculates: see above. Neither the parameters nor the constraint of the request make the
        choice of a token depend on the tokens before it other than through the model.
      starts_speculation: whether the request did not speculate in its previous step, so that the
        device must be given its tokens. ``num_unknown_tokens`` is exact then.
      num_drafts: the most draft tokens in this step; 0 if the request does not speculate.
    """

    request_id: str
    row: int
    is_new: bool
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    table_updates: Sequence[TableUpdate]
    samples: bool
    params: SamplingParams
    eos_token_id: int | None
    num_prompt_tokens: int
    known_token_ids: Sequence[int]
    num_unknown_tokens: int = 0
    constraint: Constraint | None = None
    speculates: bool = False
    starts_speculation: bool = False
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step that belong to the request. Each row samples at most one token."""
        return 1 + self.num_drafts

    @property
    def num_prompt_targets(self) -> int:
        """Number of positions followed by a prompt token whose log probability is requested.

        These are the first positions of ``[start, start + num_tokens)``.
        """
        if self.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.num_tokens, self.num_prompt_tokens - 1 - self.start))

    @property
    def pools(self) -> bool:
        """Whether the step returns a pooled hidden state for this request.

        Mean pooling sums over every step of the prompt; last-token pooling needs only the last one.
        """
        return self.params.pooling == "mean" or (self.params.pooling == "last" and self.samples)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step runs.

    Attributes:
      step_id: steps are numbered from 0 in the order in which they run.
      scheduled: the scheduled requests in packing order: first those whose rows have one token
        (decode), then the others.
      speculates: whether any of them speculates.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    speculates: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs through the model."""
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def rows(self) -> tuple[ScheduledRequest, ...]:
        """The request of each row of the step, in packing order."""
        if not self.speculates:
            return self.scheduled
        return tuple(s for s in self.scheduled for _ in range(s.num_rows))

    @property
    def sampling(self) -> tuple[ScheduledRequest, ...]:
        """The scheduled requests that sample, in packing order."""
        return tuple(s for s in self.scheduled if s.samples)

    @property
    def scoring(self) -> tuple[ScheduledRequest, ...]:
        """The scheduled requests with ``num_prompt_targets`` > 0, in packing order."""
        # Tests the parameter first: the property costs more, and few requests ask for it.
        return tuple(
            s
            for s in self.scheduled
            if s.params.prompt_logprobs is not None and s.num_prompt_targets
        )

    @property
    def pooling(self) -> tuple[ScheduledRequest, ...]:
        """The scheduled requests with ``pools``, in packing order."""
        return tuple(s for s in self.scheduled if s.params.pooling is not None and s.pools)

    @property
    def is_constrained(self) -> bool:
        """Whether any sampled token has a constraint."""
        return any(s.constraint is not None and s.samples for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
      token_ids: the tokens that each request sampled, aligned with ``plan.sampling``. There is one,
        and one more for each accepted draft.
      logprobs: for each request an entry per token, or None if it did not ask; None if no request
        asked.
      prompt_logprobs: aligned with ``plan.scoring``; one entry per position that
        `ScheduledRequest.num_prompt_targets` counts.
      pooled: aligned with ``plan.pooling``; the hidden state of the last token, or the sum of the
        hidden states over the scheduled tokens.
      num_drafts: the drafts that were proposed for each request, aligned with ``plan.sampling``;
        empty if the plan does not speculate.
    """

    token_ids: Sequence[list[int]]
    logprobs: Sequence[list[TokenLogprobs] | None] | None = None
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    pooled: Sequence[Sequence[float]] = ()
    num_drafts: Sequence[int] = ()


class StepHandle(Protocol):
    """A step in flight: its forward pass has been started.

    Sampling has been started too, unless the plan `is_constrained`. The mask of a constraint
    depends on the token that the previous step samples, so it is filled once that token is known,
    while the forward pass runs.
    """

    def sample(self) -> None:
        """Starts the sampling of a constrained plan.

        Call it exactly once, after the results of all earlier steps were applied to the scheduler
        and before the next step is executed.
        """
        ...

    def result(self) -> StepResult:
        """Waits for the step and returns its result. Call it once."""
        ...


class Runner(Protocol):
    """Runs steps in the order in which `execute` receives them."""

    @property
    def num_compilations(self) -> int:
        """Programs compiled since the start; after warm-up only rare ones are added."""
        ...

    def execute(self, plan: StepPlan) -> StepHandle:
        """Starts a step and returns without waiting for it; see `StepHandle`."""
        ...

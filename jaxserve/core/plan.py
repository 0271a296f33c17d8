"""What a step runs, what comes back, and who runs it: the seam between scheduler and runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from jaxserve.core.constraint import Constraint
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.sampling_params import SamplingParams


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: the tokens at positions ``[start, start + num_tokens)``.

        0 ........ start ................ start + num_tokens ......... tokens so far
        | computed | computed in this step | left for later steps      |

    A msgspec struct, since one is made for every request in every step and they are cheap to make.

    Attributes:
      request_id: the request.
      row: its row in the per-request device arrays, in ``[0, max_num_seqs)``; its own from
        admission to finish or preemption.
      is_new: the request has just got this row: forget what the row held before.
      start: position of the first token of the part.
      num_tokens: length of the part, at least 1.
      token_ids: the tokens of the part; empty when the one token is the one sampled last in this
        row, which is on the device and perhaps not yet on the host.
      block_offset: index in the row's block table of the first of ``new_block_ids``.
      new_block_ids: blocks to append to the row's block table, in order.
      samples: whether the part reaches the last known token, so that the step samples the token at
        position ``start + num_tokens``.
      params: the sampling parameters of the request; ``seed`` is set.
      eos_token_id: the end token that ``params.min_tokens`` holds back, or None.
      num_prompt_tokens: tokens at positions below this came with the prompt; the rest is output.
      constraint: what the sampled token must obey, or None.
      known_token_ids: every token of the request that the host knows, prompt first. Read it while
        the step is built, not later: it grows.
      num_unknown_tokens: how many tokens after ``known_token_ids`` were sampled on the device
        before this step and are not yet known to the host; 0 or 1.
    """

    request_id: str
    row: int
    is_new: bool
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    block_offset: int
    new_block_ids: Sequence[int]
    samples: bool
    params: SamplingParams
    eos_token_id: int | None
    num_prompt_tokens: int
    known_token_ids: Sequence[int]
    num_unknown_tokens: int = 0
    constraint: Constraint | None = None

    @property
    def num_prompt_targets(self) -> int:
        """How many tokens of the part are followed by one whose log probability, as a token of the
        prompt, is asked for. They are the first ones of the part.
        """
        if self.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.num_tokens, self.num_prompt_tokens - 1 - self.start))

    @property
    def pools(self) -> bool:
        """Whether the sum of hidden states over the part is asked for, or the one of its end."""
        return self.params.pooling == "mean" or (self.params.pooling == "last" and self.samples)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step runs, in the order in which it is packed.

    Parts of one token come first (decode), longer ones after them.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs through the model."""
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def sampling(self) -> tuple[ScheduledRequest, ...]:
        """The parts that sample a token, in packing order."""
        return tuple(part for part in self.scheduled if part.samples)

    @property
    def scoring(self) -> tuple[ScheduledRequest, ...]:
        """The parts with `ScheduledRequest.num_prompt_targets`, in packing order."""
        return tuple(
            part
            for part in self.scheduled
            if part.params.prompt_logprobs is not None and part.num_prompt_targets
        )

    @property
    def pooling(self) -> tuple[ScheduledRequest, ...]:
        """The parts with `ScheduledRequest.pools`, in packing order."""
        return tuple(
            part for part in self.scheduled if part.params.pooling is not None and part.pools
        )

    @property
    def is_constrained(self) -> bool:
        """Whether a token that is sampled has to obey a constraint."""
        return any(part.constraint is not None and part.samples for part in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, aligned with ``plan.sampling``.

    ``logprobs`` has an entry per sampled token, None for the requests that did not ask; it is None
    if none asked. ``prompt_logprobs`` is aligned with ``plan.scoring`` and has an entry for each of
    the part's `ScheduledRequest.num_prompt_targets`. ``pooled`` is aligned with ``plan.pooling``
    and has a vector for each part: of its last token, or the sum over its tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    pooled: Sequence[Sequence[float]] = ()


class StepHandle(Protocol):
    """A step in flight.

    The forward pass runs. If the plan `is_constrained`, sampling waits for `sample`: what may be
    sampled depends on tokens that the step before it samples, so that masks are filled when those
    are known, while the forward pass runs.
    """

    def sample(self) -> None:
        """Starts the sampling of a constrained plan. Call it once, when all results of earlier
        steps have been taken in, and before the next step is executed.
        """
        ...

    def result(self) -> StepResult:
        """Waits for the step. Call it once."""
        ...


class Runner(Protocol):
    """Runs steps in the order in which they are given."""

    @property
    def num_compilations(self) -> int:
        """Programs compiled since the start; constant after warm-up."""
        ...

    def execute(self, plan: StepPlan) -> StepHandle:
        """Starts a step and returns without waiting for it; see `StepHandle`."""
        ...

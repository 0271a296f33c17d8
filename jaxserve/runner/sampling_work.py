"""The sampler's part of a step, between the forward pass and the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float32, Int32

from jaxserve.arrays import Leaf
from jaxserve.core.plan import StepPlan
from jaxserve.runner.declared_stages import NO_STAGES, StageWork
from jaxserve.runner.draft_rows import Verified
from jaxserve.runner.sampling_batch import SamplingNeeds
from jaxserve.sampling.inputs import LastTokens, SamplingInputs
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.stages import Logits

Verify = Callable[
    [Int32[Array, " a"] | None, Sequence[int], LastTokens], tuple[LastTokens, Verified]
]
"""Verifies drafts: (sampled tokens i32[A], the rows they are for, last tokens) -> results."""

NO_REQUESTS = StepPlan(step_id=-1, scheduled=())
"""A plan without requests, for warm-ups."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The results of the sampler for one step.

    Attributes:
      tokens: i32[A], a token for each row in `SamplingNeeds.to_sample`, then padding; or None.
      logprobs: for the rows in `SamplingNeeds.to_score`, then padding; or None.
      verified: the outcome of drafts, if the plan speculates, else None.
    """

    tokens: Int32[Leaf, " a"] | None
    logprobs: Logprobs | None
    verified: Verified | None = None


@dataclasses.dataclass(frozen=True)
class SamplingWork:
    """The sampler's part of a step whose forward pass has been started.

    Attributes:
      plan: the plan of the step.
      needs: the work of the sampler for the plan.
      logits: f32[A, V], the rows to sample, or None.
      inputs: the parameters of those rows, as numpy arrays, or None. The masks of constraints are
        not filled yet.
      raw: f32[B, V], the rows to score as the model computed them, or None.
      stages: the work of the declared stages.
      positions: i32[A], the position of the token that each row of ``logits`` samples; None: the
        host knows all of them, and they are in ``inputs``.
    """

    plan: StepPlan
    needs: SamplingNeeds
    logits: Logits | None
    inputs: SamplingInputs | None
    raw: Float32[Array, "b vocab"] | None
    stages: StageWork = NO_STAGES
    positions: Int32[Array, " a"] | None = None

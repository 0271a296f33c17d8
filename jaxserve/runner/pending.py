"""A step in flight, and the transfer of its results to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.core.plan import StepPlan, StepResult
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.runner.pooling import PooledVectors
from jaxserve.runner.prompt_logprobs import PromptScores
from jaxserve.runner.token_sampler import Sampled, SamplingWork
from jaxserve.sampling.logprobs import to_message


class PendingStep:
    """A step in flight: forward pass started -> `sample` -> sampler started -> `result`.

    Args:
      plan: the plan of the step.
      most_likely: i32[R], the most likely token of each request.
      work: the sampler's part of the step.
      run_sampler: starts that part without waiting for it.
      scores: the prompt log probabilities of the step, or None.
      pooled: the pooled vectors of the step, or None.
    """

    def __init__(
        self,
        plan: StepPlan,
        most_likely: Int32[Array, " rows"],
        work: SamplingWork,
        run_sampler: Callable[[SamplingWork], Sampled],
        *,
        scores: PromptScores | None,
        pooled: PooledVectors | None,
    ) -> None:
        self._plan = plan
        self._most_likely = most_likely
        self._work = work
        self._run_sampler = run_sampler
        self._scores = scores
        self._pooled = pooled
        self._sampled: Sampled | None = None
        most_likely.copy_to_host_async()

    def sample(self) -> None:
        """Starts the sampler. Call it once, before the next step is executed."""
        assert self._sampled is None, "sampled already"
        self._sampled = self._run_sampler(self._work)
        for array in jax.tree.leaves(self._sampled):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Waits for the step and returns its results. Call it once, after `sample`."""
        assert self._sampled is not None, "not sampled yet"
        sampled = jax.tree.map(np.asarray, self._sampled)
        tokens = np.array(self._most_likely)
        if sampled.tokens is not None:
            indices = list(self._work.needs.to_sample)
            tokens[indices] = sampled.tokens[: len(indices)]
        indices = [i for i, part in enumerate(self._plan.scheduled) if part.samples]
        return StepResult(
            tokens[indices].tolist(),
            None if sampled.logprobs is None else self._logprobs(sampled, tokens, indices),
            prompt_logprobs=() if self._scores is None else self._scores.result(),
            pooled=() if self._pooled is None else self._pooled.result(),
        )

    def _logprobs(
        self, sampled: Sampled, tokens: Int32[np.ndarray, " rows"], indices: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Returns an entry per index in ``plan.scheduled``; None if the request did not ask."""
        assert sampled.logprobs is not None
        found = {}
        for row, i in enumerate(self._work.needs.to_score):
            k = self._plan.scheduled[i].params.logprobs
            assert k is not None
            found[i] = to_message(sampled.logprobs, row, int(tokens[i]), k)
        return [found.get(i) for i in indices]

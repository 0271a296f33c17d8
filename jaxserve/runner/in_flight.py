"""A step on the device, and the way of its results to the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxserve.core.plan import StepPlan, StepResult
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.runner.pooling import PooledVectors
from jaxserve.runner.prompt_logprobs import PromptScores
from jaxserve.runner.sampling_batch import SamplingNeeds
from jaxserve.runner.token_sampler import Sampled
from jaxserve.sampling.logprobs import to_message


class StepInFlight:
    """A step in flight.

    Args:
      plan: of the step.
      best: i32[R], the most likely token of each request.
      needs: which requests get another token, or log probabilities.
      sampled: those, or what starts the sampling when it is called.
      scores: the prompt log probabilities that it was asked for, or None.
      pooled: the vectors that it was asked for, or None.
    """

    def __init__(
        self,
        plan: StepPlan,
        best: jax.Array,
        needs: SamplingNeeds,
        sampled: Sampled | Callable[[], Sampled],
        *,
        scores: PromptScores | None,
        pooled: PooledVectors | None,
    ) -> None:
        self._plan = plan
        self._best = best
        self._needs = needs
        self._scores = scores
        self._pooled = pooled
        self._sampled = sampled
        best.copy_to_host_async()
        if isinstance(sampled, Sampled):
            _copy_to_host(sampled)

    def sample(self) -> None:
        """Starts the sampling that had to wait."""
        assert not isinstance(self._sampled, Sampled), "sampled already"
        self._sampled = self._sampled()
        _copy_to_host(self._sampled)

    def result(self) -> StepResult:
        """Waits for the step."""
        assert isinstance(self._sampled, Sampled), "not sampled yet"
        sampled = jax.tree.map(np.asarray, self._sampled)
        tokens = np.array(self._best)
        if sampled.tokens is not None:
            tokens[list(self._needs.chosen)] = sampled.tokens[: len(self._needs.chosen)]
        places = [i for i, part in enumerate(self._plan.scheduled) if part.samples]
        return StepResult(
            tokens[places].tolist(),
            None if sampled.logprobs is None else self._logprobs(sampled, tokens, places),
            prompt_logprobs=() if self._scores is None else self._scores.result(),
            pooled=() if self._pooled is None else self._pooled.result(),
        )

    def _logprobs(
        self, sampled: Sampled, tokens: np.ndarray, places: list[int]
    ) -> list[TokenLogprobs | None]:
        assert sampled.logprobs is not None
        found = {}
        for row, place in enumerate(self._needs.scored):
            k = self._plan.scheduled[place].params.logprobs
            assert k is not None
            found[place] = to_message(sampled.logprobs, row, int(tokens[place]), k)
        return [found.get(place) for place in places]


def _copy_to_host(sampled: Sampled) -> None:
    for array in jax.tree.leaves(sampled):
        array.copy_to_host_async()

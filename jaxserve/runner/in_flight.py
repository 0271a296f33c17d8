"""A step on the device, and the way of its results to the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxserve.core.plan import StepPlan, StepResult
from jaxserve.messages import TokenLogprobs
from jaxserve.runner.pooling import PooledVectors
from jaxserve.runner.prompt_logprobs import PromptScores
from jaxserve.sampling.logprobs import to_message
from jaxserve.sampling.sampler import Sampled


class StepInFlight:
    """A step under way.

    Args:
      plan: of the step.
      sampled: what it samples, or what starts the sampling when it is called.
      scores: the prompt log probabilities that it was asked for, or None.
      pooled: the vectors that it was asked for, or None.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | Callable[[], Sampled],
        *,
        scores: PromptScores | None,
        pooled: PooledVectors | None,
    ) -> None:
        self._asked = [
            (row, part.params.logprobs) for row, part in enumerate(plan.scheduled) if part.samples
        ]
        self._scores = scores
        self._pooled = pooled
        self._sampled = sampled
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
        tokens = sampled.tokens[[row for row, _ in self._asked]].tolist()
        return StepResult(
            tokens,
            None if sampled.logprobs is None else self._logprobs(sampled, tokens),
            prompt_logprobs=() if self._scores is None else self._scores.result(),
            pooled=() if self._pooled is None else self._pooled.result(),
        )

    def _logprobs(self, sampled: Sampled, tokens: list[int]) -> list[TokenLogprobs | None]:
        assert sampled.logprobs is not None
        return [
            None if k is None else to_message(sampled.logprobs, row, token, k)
            for (row, k), token in zip(self._asked, tokens, strict=True)
        ]


def _copy_to_host(sampled: Sampled) -> None:
    for array in jax.tree.leaves(sampled):
        array.copy_to_host_async()

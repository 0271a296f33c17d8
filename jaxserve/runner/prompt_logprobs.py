"""Log probabilities of the tokens of prompts, from the hidden states of a step.

Logits of a whole prompt would take much memory, so they are made of a fixed number of rows at a
time. That also leaves one program for each number of most likely tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import StepPlan
from jaxserve.messages import TokenLogprobs
from jaxserve.runner.programs import CompilationLog, Program
from jaxserve.runner.step import LanguageModel
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs, logprobs_size, to_message

CHUNK = 64
"""Rows of logits that exist at the same time."""


class PromptScorer:
    """Starts the computation of prompt log probabilities.

    Args:
      bind: makes the model from its parameters; called while tracing.
      vocab_size: V.
      logprobs_mode: raw or processed is the same for tokens that were not sampled.
      log: is told of compilations.
    """

    def __init__(
        self,
        bind: Callable[[Any], LanguageModel],
        vocab_size: int,
        *,
        logprobs_mode: LogprobsMode,
        log: CompilationLog,
    ) -> None:
        self._vocab_size = vocab_size

        @jax.jit
        def take(hidden: jax.Array, rows: jax.Array) -> jax.Array:
            return hidden[rows]

        @functools.partial(jax.jit, static_argnames="k")
        def score(params: Any, hidden: jax.Array, targets: jax.Array, *, k: int) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            return compute_logprobs(bind(params).logits(hidden), targets, k, as_logits=as_logits)

        self._take = Program("gathering hidden states", take, log)
        self._score = Program("log probabilities of prompts", score, log)

    def start(self, params: Any, hidden: jax.Array, plan: StepPlan) -> PromptScores | None:
        """Starts what a plan asks for, if anything, without waiting for it.

        Args:
          params: the weights.
          hidden: [T, D], of the tokens of the step.
          plan: of the step.
        """
        scoring = plan.scoring
        if not scoring:
            return None
        rows, targets = _rows_and_targets(plan)
        most = max(part.params.prompt_logprobs or 0 for part in scoring)
        k = logprobs_size(most, self._vocab_size)
        chunks = []
        for start in range(0, len(rows), CHUNK):
            end = start + CHUNK
            taken = self._take(hidden, rows[start:end], shapes=f"{len(hidden)} tokens")
            shapes = f"{k} most likely tokens"
            chunk = self._score(params, taken, targets[start:end], k=k, shapes=shapes)
            chunks.append(chunk)
            for array in jax.tree.leaves(chunk):
                array.copy_to_host_async()
        return PromptScores(plan, chunks, targets)


class PromptScores:
    """Prompt log probabilities under way."""

    def __init__(self, plan: StepPlan, chunks: list[Logprobs], targets: np.ndarray) -> None:
        self._plan = plan
        self._chunks = chunks
        self._targets = targets

    def result(self) -> list[list[TokenLogprobs]]:
        """Waits for them; aligned with ``plan.scoring``."""
        scores = jax.tree.map(lambda *arrays: np.concatenate(arrays), *self._chunks)
        tokens = self._targets.tolist()
        found, at = [], 0
        for part in self._plan.scoring:
            k, end = part.params.prompt_logprobs or 0, at + part.num_prompt_targets
            found.append([to_message(scores, row, tokens[row], k) for row in range(at, end)])
            at = end
        return found


def _rows_and_targets(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of each wanted token: the index in the step of the one before it, and the token itself.

    i32[N] both, padded with 0 to a multiple of `CHUNK`.
    """
    rows: list[int] = []
    targets: list[int] = []
    first = 0
    for part in plan.scheduled:
        count = part.num_prompt_targets
        rows += range(first, first + count)
        targets += part.known_token_ids[part.start + 1 : part.start + 1 + count]
        first += part.num_tokens
    padding = [0] * (-len(rows) % CHUNK)
    return np.array(rows + padding, np.int32), np.array(targets + padding, np.int32)

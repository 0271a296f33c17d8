"""Computes log probabilities of the tokens of prompts from the hidden states of a step.

The logits of a whole prompt would take much memory, so they are computed for a fixed number of rows
at a time. With a fixed number of rows, each number of most likely tokens needs only one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import StepPlan
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.runner.jit import CompilationLog, Program
from jaxserve.runner.placement import ONE_DEVICE, WHOLE, Placement
from jaxserve.runner.step import LanguageModel
from jaxserve.sampling.finite import all_finite
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs, logprobs_size, to_message

CHUNK = 64
"""Rows of logits that exist at the same time."""

NOT_FINITE = 0
"""The rank of a token whose logits are not finite. Other ranks start at 1."""


class PromptScorer:
    """Starts the computation of prompt log probabilities.

    Args:
      bind: makes the model from its parameters; called while tracing.
      vocab_size: V.
      logprobs_mode: see `LogprobsConfig`. Raw and processed are the same here, since prompt tokens
        are not sampled.
      log: receives the compilations.
      placement: the devices that compute the logits together.
      param_specs: `placement.specs` of the parameters.
      checks_finite: whether to look for logits that are not finite.
    """

    def __init__(
        self,
        bind: Callable[[Any], LanguageModel],
        vocab_size: int,
        *,
        logprobs_mode: LogprobsMode,
        log: CompilationLog,
        placement: Placement = ONE_DEVICE,
        param_specs: Any = WHOLE,
        checks_finite: bool = True,
    ) -> None:
        self._vocab_size = vocab_size

        def logits_of(params: Any, hidden: Float[Array, "chunk hidden"]) -> Array:
            return bind(params).logits(hidden)

        all_logits = placement.on_each_device(
            logits_of, in_specs=(param_specs, WHOLE), out_specs=WHOLE
        )

        @jax.jit
        def take_hidden_step(
            hidden: Float[Array, "tokens hidden"], indices: Int32[Array, " chunk"]
        ) -> Float[Array, "chunk hidden"]:
            return hidden[indices]

        @functools.partial(jax.jit, static_argnames="k")
        def score_prompt_step(
            params: Any,
            hidden: Float[Array, "chunk hidden"],
            targets: Int32[Array, " chunk"],
            *,
            k: int,
        ) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            logits = all_logits(params, hidden)
            scores = compute_logprobs(logits, targets, k, as_logits=as_logits)
            if not checks_finite:
                return scores
            ranks = jnp.where(all_finite(logits), scores.ranks, NOT_FINITE)
            return dataclasses.replace(scores, ranks=ranks)

        self._take = Program("gathering hidden states", take_hidden_step, log)
        self._score = Program("log probabilities of prompts", score_prompt_step, log)

    def start(
        self, params: Any, hidden: Float[Array, "tokens hidden"], plan: StepPlan
    ) -> PromptScores | None:
        """Starts the scoring that a plan asks for, without waiting for it.

        Args:
          params: the weights.
          hidden: [T, D], hidden states of the tokens of the step.
          plan: the plan of the step.

        Returns:
          The log probabilities in flight, or None if the plan asks for none.
        """
        scoring = plan.scoring
        if not scoring:
            return None
        indices, targets = _indices_and_targets(plan)
        most = max(part.params.prompt_logprobs or 0 for part in scoring)
        chunks = []
        for start in range(0, len(indices), CHUNK):
            taken = self._taken(hidden, indices[start : start + CHUNK])
            chunk = self._scored(params, taken, targets[start : start + CHUNK], most)
            chunks.append(chunk)
            for array in jax.tree.leaves(chunk):
                array.copy_to_host_async()
        return PromptScores(plan, chunks, targets)

    def warm_ups(
        self, params: Any, hidden: Mapping[int, Array], sizes: Iterable[int]
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each common program and a function that compiles it by running it.

        ``sizes`` are the numbers of tokens that a step may have. By the time a function is called,
        ``hidden`` must hold the hidden states of some step of each size.
        """
        nothing = np.zeros(CHUNK, np.int32)
        sizes = sorted(sizes)
        for size in sizes:
            name = f"{CHUNK} of {size} tokens"
            yield name, lambda size=size: self._taken(hidden[size], nothing)

        def score() -> Logprobs:
            return self._scored(params, self._taken(hidden[sizes[0]], nothing), nothing, 0)

        yield "log probabilities of prompts", score

    def _taken(
        self, hidden: Float[Array, "tokens hidden"], indices: Int32[np.ndarray, " chunk"]
    ) -> Float[Array, "chunk hidden"]:
        return self._take(hidden, indices, shapes=f"{CHUNK} of {len(hidden)} tokens")

    def _scored(
        self,
        params: Any,
        hidden: Float[Array, "chunk hidden"],
        targets: Int32[np.ndarray, " chunk"],
        most: int,
    ) -> Logprobs:
        k = logprobs_size(most, self._vocab_size)
        return self._score(params, hidden, targets, k=k, shapes=f"{k} most likely tokens")


class PromptScores:
    """Prompt log probabilities in flight."""

    def __init__(
        self, plan: StepPlan, chunks: list[Logprobs], targets: Int32[np.ndarray, " n"]
    ) -> None:
        self._plan = plan
        self._chunks = chunks
        self._targets = targets

    def result(self) -> tuple[list[list[TokenLogprobs]], list[bool]]:
        """Waits for the log probabilities.

        Returns:
          (the log probabilities, whether they come from finite logits), both aligned with
          ``plan.scoring``.
        """
        scores = jax.tree.map(lambda *arrays: np.concatenate(arrays), *self._chunks)
        tokens = self._targets.tolist()
        found, is_finite, at = [], [], 0
        for part in self._plan.scoring:
            k, end = part.params.prompt_logprobs or 0, at + part.num_prompt_targets
            found.append([to_message(scores, row, tokens[row], k) for row in range(at, end)])
            is_finite.append(bool((scores.ranks[at:end] != NOT_FINITE).all()))
            at = end
        return found, is_finite


def _indices_and_targets(
    plan: StepPlan,
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Returns where the hidden states to score are in a step, and the prompt tokens that follow.

    Returns:
      (indices, targets), both i32[N] and padded with 0 to a multiple of `CHUNK`. ``indices`` has
      the index in the step of the token before each prompt token in ``targets``.
    """
    indices: list[int] = []
    targets: list[int] = []
    first = 0
    for part in plan.scheduled:
        count = part.num_prompt_targets
        indices += range(first, first + count)
        targets += part.known_token_ids[part.start + 1 : part.start + 1 + count]
        first += part.num_tokens
    padding = [0] * (-len(indices) % CHUNK)
    return np.array(indices + padding, np.int32), np.array(targets + padding, np.int32)

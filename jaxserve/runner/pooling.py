"""Vectors of whole prompts, from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.plan import StepPlan
from jaxserve.runner.programs import CompilationLog, Program
from jaxserve.runner.step import LanguageModel

CHUNK = 8
"""Requests that are pooled at the same time."""


class Pooler:
    """Starts the pooling of hidden states.

    Args:
      bind: makes the model from its parameters; called while tracing.
      log: is told of compilations.
    """

    def __init__(self, bind: Callable[[Any], LanguageModel], *, log: CompilationLog) -> None:
        @jax.jit
        def pool(params: Any, hidden: jax.Array, weights: jax.Array) -> jax.Array:
            final = bind(params).final(hidden).astype(jnp.float32)
            # Padding may be anything, also no number.
            final = jnp.where(weights.any(0)[:, None], final, 0.0)
            return jnp.matmul(weights, final, precision=lax.Precision.HIGHEST)

        self._pool = Program("pooling", pool, log)

    def start(self, params: Any, hidden: jax.Array, plan: StepPlan) -> PooledVectors | None:
        """Starts what a plan asks for, if anything, without waiting for it.

        Args:
          params: the weights.
          hidden: [T, D], of the tokens of the step.
          plan: of the step.
        """
        count = len(plan.pooling)
        if count == 0:
            return None
        weights = np.zeros((-(-count // CHUNK) * CHUNK, len(hidden)), np.float32)
        i = first = 0
        for part in plan.scheduled:
            end = first + part.num_tokens
            if part.pools:
                weights[i, first if part.params.pooling == "mean" else end - 1 : end] = 1
                i += 1
            first = end
        chunks = [
            self._pool(params, hidden, weights[at : at + CHUNK], shapes=f"{len(hidden)} tokens")
            for at in range(0, len(weights), CHUNK)
        ]
        for chunk in chunks:
            chunk.copy_to_host_async()
        return PooledVectors(chunks, count)


class PooledVectors:
    """Pooled hidden states in flight."""

    def __init__(self, chunks: list[jax.Array], count: int) -> None:
        self._chunks = chunks
        self._count = count

    def result(self) -> list[list[float]]:
        """Waits for them; aligned with ``plan.pooling``."""
        return np.concatenate(self._chunks)[: self._count].tolist()

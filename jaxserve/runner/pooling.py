"""Pools the hidden states of a step into vectors of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxserve.core.plan import StepPlan
from jaxserve.runner.jit import CompilationLog, Program
from jaxserve.runner.step import LanguageModel

CHUNK = 8
"""Requests that one call pools. The number is fixed, to have one program per number of tokens."""


class Pooler:
    """Starts the computation of pooled vectors.

    Args:
      bind: makes the model from its parameters; called while tracing.
      log: receives the compilations.
    """

    def __init__(self, bind: Callable[[Any], LanguageModel], *, log: CompilationLog) -> None:
        @jax.jit
        def pool(
            params: Any,
            hidden: Float[Array, "tokens hidden"],
            weights: Float32[Array, "chunk tokens"],
        ) -> Float32[Array, "chunk hidden"]:
            final = bind(params).final(hidden).astype(jnp.float32)
            # Hidden states of padding may be NaN, which a weight of 0 would not remove.
            final = jnp.where(weights.any(0)[:, None], final, 0.0)
            return jnp.matmul(weights, final, precision=lax.Precision.HIGHEST)

        self._pool = Program("pooling", pool, log)

    def start(
        self, params: Any, hidden: Float[Array, "tokens hidden"], plan: StepPlan
    ) -> PooledVectors | None:
        """Starts the pooling that a plan asks for, without waiting for it.

        Args:
          params: the weights.
          hidden: [T, D], hidden states of the tokens of the step.
          plan: the plan of the step.

        Returns:
          The vectors in flight, or None if the plan asks for no pooling.
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

    def __init__(self, chunks: list[Float32[Array, "chunk hidden"]], count: int) -> None:
        self._chunks = chunks
        self._count = count

    def result(self) -> tuple[list[list[float]], list[bool]]:
        """Waits for the vectors.

        Returns:
          (the vectors, whether each is finite), both aligned with ``plan.pooling``.
        """
        vectors = np.concatenate(self._chunks)[: self._count]
        return vectors.tolist(), np.isfinite(vectors).all(-1).tolist()

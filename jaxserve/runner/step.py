"""The jitted step of an engine.

It runs the model, whose programs are large, for any kind of sampling, and takes the most likely
tokens. What else a request may ask for is in the sampler (`sampling_steps`), whose programs are
small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxserve.arrays import Leaf
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.runner.batch import StepInputs
from jaxserve.runner.packing import Packed
from jaxserve.sampling.vocabulary import argmax


class LanguageModel(Protocol):
    """What the step needs of a model."""

    def __call__(
        self, tokens: jax.Array, kv: KVCache, meta: AttentionMeta, *, attention: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states [T, D] of tokens i32[T], and the cache with their keys and values."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[L, V] for hidden states [L, D]."""
        ...

    def final(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [L, D] as the head sees them, for embeddings."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepState:
    """What one step leaves to the next, on the device.

    Attributes:
      kv: the KV cache.
      last_tokens: i32[S], the token sampled last in each of the engine's rows.
    """

    kv: KVCache
    last_tokens: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What the model makes of the tokens of a step.

    Attributes:
      hidden: [T, D], of every token, to be given to `LanguageModel.logits`.
      logits: f32[R, V], after the last token of each request.
      best: i32[R], the most likely next tokens.
    """

    hidden: Leaf
    logits: Leaf
    best: Leaf


# The compiler takes a donated cache, which fills most of the memory, for several, and would compute
# some of every layer twice to make room for them.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}

StepFn = Callable[[Any, StepState, Packed], tuple[StepState, Forward]]


def make_step(bind: Callable[[Any], LanguageModel], attention: AttentionBackend) -> StepFn:
    """The jitted step.

    ``(params, state, packed StepInputs) -> (state, Forward)``; the state that is passed in is gone
    afterwards.

    Args:
      bind: makes the model from its parameters; called while tracing.
      attention: the kernels for the cache.
    """

    @functools.partial(jax.jit, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    def step(params: Any, state: StepState, packed: Packed) -> tuple[StepState, Forward]:
        inputs: StepInputs = packed.unpack()
        known = inputs.sources < 0
        tokens = jnp.where(known, inputs.tokens, state.last_tokens[inputs.sources])
        model = bind(params)
        hidden, kv = model(tokens, state.kv, inputs.meta, attention=attention)
        logits = model.logits(hidden[inputs.last])
        best = argmax(logits)
        last_tokens = state.last_tokens.at[inputs.targets].set(best, mode="drop")
        return StepState(kv, last_tokens), Forward(hidden, logits, best)

    return step

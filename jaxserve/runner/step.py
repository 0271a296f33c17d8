"""The jitted step of an engine.

The step runs the model and takes the most likely token of each request. Everything else that a
request may ask for is in the small programs of `TokenSampler`. So all kinds of sampling share the
programs that contain the model, which are slow to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.arrays import Leaf
from jaxserve.ops.attention import AttentionBackend, KVCache, StepMeta
from jaxserve.runner import kv_cache
from jaxserve.runner.batch import StepInputs
from jaxserve.runner.jit import Packed
from jaxserve.runner.placement import ONE_DEVICE, WHOLE, Placement
from jaxserve.sampling.finite import marked_argmax, without_marks
from jaxserve.sampling.inputs import LastTokens
from jaxserve.sampling.vocabulary import argmax


class LanguageModel(Protocol):
    """The interface of a model that the runner uses."""

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        kv: KVCache,
        meta: StepMeta,
        *,
        attention: AttentionBackend,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache]:
        """Returns hidden states [T, D] of tokens i32[T], and the cache with their keys and values.

        ``kv`` is donated: do not use it afterwards.
        """
        ...

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float32[Array, "n vocab"]:
        """Returns the logits f32[N, V] of hidden states [N, D]. All must be finite."""
        ...

    def final(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n hidden"]:
        """Returns hidden states [N, D] as the output layer sees them, for embeddings."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepState:
    """The state on the device that one step passes to the next.

    Attributes:
      kv: the KV cache.
      last_tokens: i32[S], the token sampled last in each engine row.
    """

    kv: KVCache
    last_tokens: Int32[Leaf, " engine_rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """The results of the model for the tokens of a step.

    Attributes:
      hidden: [T, D], the hidden state of every token, an input of `LanguageModel.logits`.
      logits: f32[R, V], after the last token of each request.
      most_likely: i32[R], the most likely next token of each request, marked if its logits are not
        finite; see `sampling.finite`.
    """

    hidden: Float[Leaf, "tokens hidden"]
    logits: Float32[Leaf, "rows vocab"]
    most_likely: Int32[Leaf, " rows"]


# XLA counts the donated cache, which fills most of the memory, several times. It then believes that
# memory is short and computes parts of every layer twice.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}

StepFn = Callable[[Any, StepState, Packed], tuple[StepState, Forward]]


def make_step(
    bind: Callable[[Any], LanguageModel],
    attention: AttentionBackend,
    placement: Placement = ONE_DEVICE,
    *,
    param_specs: Any = WHOLE,
    checks_finite: bool = True,
) -> StepFn:
    """Returns the jitted step, ``(params, state, packed StepInputs) -> (state, Forward)``.

    The step donates its state argument.

    Args:
      bind: makes the model from its parameters; called while tracing.
      attention: the attention backend.
      placement: the devices that run the step together.
      param_specs: `placement.specs` of the parameters.
      checks_finite: whether to mark the tokens of logits that are not finite.
    """

    def compute(
        params: Any, kv: KVCache, last_tokens: LastTokens, packed: Packed
    ) -> tuple[KVCache, LastTokens, Forward]:
        inputs: StepInputs = packed.unpack()
        is_known = inputs.fed_from_row < 0
        tokens = jnp.where(is_known, inputs.tokens, last_tokens[inputs.fed_from_row])
        model = bind(params)
        hidden, kv = model(tokens, kv, inputs.meta, attention=attention)
        logits = model.logits(hidden[inputs.logit_tokens])
        most_likely = marked_argmax(logits) if checks_finite else argmax(logits)
        last_tokens = last_tokens.at[inputs.kept_in_row].set(
            without_marks(most_likely), mode="drop"
        )
        return kv, last_tokens, Forward(hidden, logits, most_likely)

    cache_spec = placement.spec(kv_cache.AXES)
    on_devices = placement.on_each_device(
        compute,
        in_specs=(param_specs, cache_spec, WHOLE, WHOLE),
        out_specs=(cache_spec, WHOLE, WHOLE),
    )

    @functools.partial(jax.jit, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    def step(params: Any, state: StepState, packed: Packed) -> tuple[StepState, Forward]:
        kv, last_tokens, forward = on_devices(params, state.kv, state.last_tokens, packed)
        return StepState(kv, last_tokens), forward

    return step

"""A decoder-only language model, the base of every family.

A family is a subclass in a file of its own, which says how its config and its weights are named,
and a line in `registry.MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.checkpoint.mapping import Rule
from jaxserve.errors import ConfigError
from jaxserve.models.blocks import DecoderLayer, Embed, RMSNorm, StepContext
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.ops.rope import cos_sin

Loop = Literal["scan", "unroll"]


class CausalLM(nnx.Module):
    """Embedding, decoder layers, norm, head.

    With ``loop="scan"`` each parameter of the layers is one array [L, ...] and the program holds
    one layer; with ``"unroll"`` every layer has its own arrays and is written out.

    Class attributes of a family:
      RULES: where each tensor of a checkpoint goes.
      IGNORED: tensors that the model has no use for, named as in rules.
      COPIES_OF_TIED: tensors that repeat the embedding when it is the head too.
      HF_DEFAULTS: what a config.json of this family means when it lacks a key.
      HF_FIXED: what this family does whatever its config.json says, in the words of config.json,
        and of ``attention_output_bias`` and ``qk_norm``.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()
    IGNORED: ClassVar[tuple[str, ...]] = ()
    COPIES_OF_TIED: ClassVar[tuple[str, ...]] = ()
    HF_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    HF_FIXED: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, spec: ModelSpec, *, loop: Loop) -> None:
        """Raises:
        ConfigError: the layers are not alike, so they cannot be looped over.
        """
        if loop == "scan" and not spec.layers_are_alike:
            raise ConfigError(
                "the layers of this model differ in their attention window, so they cannot be "
                "looped over; use --layer-loop unroll"
            )
        self.spec = spec
        self.embed = Embed(spec)
        if loop == "scan":
            self.layers = _stacked(DecoderLayer(spec), spec.num_layers)
        else:
            self.layers = nnx.List([DecoderLayer(spec) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = None if spec.tied_head else Embed(spec)

    def __call__(
        self,
        tokens: jax.Array,
        kv: KVCache,
        meta: AttentionMeta,
        *,
        attention: AttentionBackend,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the tokens of a step through the layers.

        Args:
          tokens: i32[T], in [0, V).
          kv: donate it, so that it is written in place.

        Returns:
          The hidden states [T, D] to be given to `logits`, and the cache.
        """
        with jax.named_scope("embed"):
            x = self.embed(tokens)
            cos, sin = cos_sin(meta.positions, self.spec.rope)
        step = StepContext(meta, cos, sin, attention)
        if isinstance(self.layers, DecoderLayer):
            return self._scan(self.layers, x, kv, step)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, kv = layer(x, kv, index, step, window=self.spec.windows[index])
        return x, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[T, D] -> f32[T, V]."""
        with jax.named_scope("logits"):
            return (self.head or self.embed).logits(self.final(hidden))

    def final(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [T, D] as the head sees them."""
        return self.norm(hidden)

    def _scan(
        self, stacked: DecoderLayer, x: jax.Array, kv: KVCache, step: StepContext
    ) -> tuple[jax.Array, KVCache]:
        graphdef, weights = nnx.split(stacked)

        # The cache is carried: as an input and output per layer it would be copied.
        def body(carry, inputs):
            x, kv = carry
            index, weights = inputs
            layer = nnx.merge(graphdef, weights)
            with jax.named_scope("layer"):
                return layer(x, kv, index, step, window=self.spec.windows[0]), None

        indices = jnp.arange(self.spec.num_layers)
        carry, _ = lax.scan(body, (x, kv), (indices, weights))
        return carry


def _stacked(layer: DecoderLayer, num_layers: int) -> DecoderLayer:
    """The same layer with every parameter [L, ...]."""
    graphdef, state = nnx.split(layer)

    def stack(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, *one.shape), one.dtype)

    return nnx.merge(graphdef, jax.tree.map(stack, state))

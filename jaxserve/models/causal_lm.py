"""A decoder-only language model, the base of every family.

A family is a subclass in its own file, with the names of its weights and the defaults of its
config.json, and a line in `registry.MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.checkpoint.mapping import Rule
from jaxserve.errors import ConfigError
from jaxserve.models.blocks import DecoderLayer, Embed, Hidden, RMSNorm, StepContext
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.ops.rope import cos_sin

Loop = Literal["scan", "unroll"]


class CausalLM(nnx.Module):
    """A token embedding, decoder layers, a norm and an output head.

    With ``loop="scan"`` each parameter of the layers is one array [L, ...] and the compiled program
    contains one layer. With ``"unroll"`` every layer has its own arrays and its own code.

    Class attributes of a family:
      RULES: the parameter that each tensor of a checkpoint fills.
      IGNORED: tensors that the model does not use, named as in rules.
      COPIES_OF_TIED: tensors that repeat the embedding if it is also the output head.
      HF_DEFAULTS: the values of keys that are missing in a config.json of this family.
      HF_FIXED: values that override config.json. It has the keys of config.json, and
        ``attention_output_bias`` and ``qk_norm``.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()
    IGNORED: ClassVar[tuple[str, ...]] = ()
    COPIES_OF_TIED: ClassVar[tuple[str, ...]] = ()
    HF_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    HF_FIXED: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, spec: ModelSpec, *, loop: Loop) -> None:
        """Builds the modules; their parameters have shapes and no values.

        Raises:
          ConfigError: ``loop`` is "scan" and the layers differ, so no loop can run them.
        """
        if loop == "scan" and not spec.layers_are_alike:
            raise ConfigError(
                "the layers of this model differ in their attention window, so they cannot run in "
                "a loop; use --layer-loop unroll"
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
        tokens: Int32[Array, " tokens"],
        kv: KVCache,
        meta: AttentionMeta,
        *,
        attention: AttentionBackend,
    ) -> tuple[Hidden, KVCache]:
        """Runs the tokens of a step through the layers.

        Args:
          tokens: i32[T], in [0, V).
          kv: the cache; donate it, so that it is written in place.
          meta: maps each token to its request and to its slot in the cache.
          attention: the backend that writes and reads the cache.

        Returns:
          The hidden states [T, D] for `logits`, and the cache with the step's keys and values.
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

    def logits(self, hidden: Hidden) -> Float32[Array, "tokens vocab"]:
        """Returns the logits f32[T, V] of hidden states [T, D]."""
        with jax.named_scope("logits"):
            return (self.head or self.embed).logits(self.final(hidden))

    def final(self, hidden: Hidden) -> Hidden:
        """Returns hidden states [T, D] as the output head sees them."""
        return self.norm(hidden)

    def _scan(
        self, stacked: DecoderLayer, x: Hidden, kv: KVCache, step: StepContext
    ) -> tuple[Hidden, KVCache]:
        graphdef, weights = nnx.split(stacked)

        # The cache is in the carry. As a scanned input and output, XLA would copy it in each layer.
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
    """Returns the layer with a leading axis of size L on every parameter."""
    graphdef, state = nnx.split(layer)

    def stack(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, *one.shape), one.dtype)

    return nnx.merge(graphdef, jax.tree.map(stack, state))

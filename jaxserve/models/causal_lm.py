"""A decoder-only language model, the base of every family.

A family is a subclass in its own file, and a line in `registry.MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.checkpoint.mapping import Rule
from jaxserve.models.blocks import Embed, Hidden, Layer, LayerContext, RMSNorm
from jaxserve.models.layout import Layout
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import cut_weights, store_weights_as
from jaxserve.ops.attention import NO_WINDOW, AttentionBackend, KVCache, StepMeta
from jaxserve.ops.linear import ArraySpec
from jaxserve.ops.rope import cos_sin


class CausalLM(nnx.Module):
    """A token embedding, decoder layers, a norm and an output head.

    Class attributes of a family:
      LAYER: makes a layer, an nnx module, from the spec of the family.
      GGUF: facts about its GGUF files; missing if the registry has no GGUF name for it.
      RULES: the parameter that each tensor of a checkpoint goes to.
      IGNORED: tensors that the model does not use, named as in rules.
      COPIES_OF_TIED: tensors that repeat the embedding when it is the output head too.
    """

    LAYER: ClassVar[type[Layer]]
    GGUF: ClassVar[GGUFNames]
    RULES: ClassVar[tuple[Rule, ...]] = ()
    IGNORED: ClassVar[tuple[str, ...]] = ()
    COPIES_OF_TIED: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Reads the config.json of the family; `hf_config` has what families share.

        Raises:
          UnsupportedModelError: a variant of the family is not implemented.
          CheckpointError: a key is missing, or sizes do not fit together.
        """
        raise NotImplementedError(cls)

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        """Builds the modules; their parameters are declared, and have no values."""
        self.spec = spec
        self.loop = layout.loop
        self.embed = Embed(spec, layout.dtype)
        if layout.loop == "scan":
            self.layers = self.LAYER(spec)
        else:
            self.layers = nnx.List([self.LAYER(spec) for _ in range(spec.num_layers)])
        self.norm = self.final_norm(spec)
        self.head = None if spec.tied_head else Embed(spec, layout.dtype)
        store_weights_as(self, layout.format)
        cut_weights(self, layout.cut)
        if layout.loop == "scan":
            self.layers = _stacked(cast(Layer, self.layers), spec.num_layers)

    def final_norm(self, spec: ModelSpec) -> Callable[[Hidden], Hidden]:
        """Returns the norm between the layers and the head, a module on hidden states [T, D]."""
        return RMSNorm(spec.hidden_size, spec.norm_eps)

    def embedded(self, tokens: Int32[Array, " tokens"]) -> Hidden:
        """Returns the input [T, D] of the first layer for tokens i32[T]."""
        return self.embed(tokens)

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        kv: KVCache,
        meta: StepMeta,
        *,
        attention: AttentionBackend,
    ) -> tuple[Hidden, KVCache]:
        """Runs the tokens of a step through the layers.

        Args:
          tokens: i32[T], in [0, V).
          kv: the cache; donate it, so that it is written in place.
          meta: maps each token to its request and to its slots in the cache.
          attention: the backend that writes and reads the cache.

        Returns:
          The hidden states [T, D] for `logits`, and the cache with the step's keys and values.
        """
        with jax.named_scope("embed"):
            x = self.embedded(tokens)
            rotations = [cos_sin(meta.positions, rope) for rope in self.spec.ropes]
        if self.loop == "scan":
            return self._scan(x, kv, meta, attention, rotations)
        layout = self.spec.cache_layout
        metas = [meta.of(group) for group in range(len(layout.windows))]
        layers = zip(cast(nnx.List, self.layers), self.spec.layers, layout.places, strict=True)
        for number, (layer, facts, (group, index)) in enumerate(layers):
            rotation = rotations[self.spec.ropes.index(facts.rope)]
            step = LayerContext(metas[group], attention, index, facts.window, *rotation)
            with jax.named_scope(f"layer_{number}"):
                x, kv = layer(x, kv, step)
        return x, kv

    def logits(self, hidden: Hidden) -> Float32[Array, "tokens vocab"]:
        """Returns the logits f32[T, V] of hidden states [T, D]."""
        with jax.named_scope("logits"):
            return (self.head or self.embed).logits(self.final(hidden))

    def final(self, hidden: Hidden) -> Hidden:
        """Returns hidden states [T, D] as the output head sees them."""
        return self.norm(hidden)

    def _scan(
        self,
        x: Hidden,
        kv: KVCache,
        meta: StepMeta,
        attention: AttentionBackend,
        rotations: list[tuple[jax.Array, jax.Array]],
    ) -> tuple[Hidden, KVCache]:
        """Runs the layers in a loop. The facts in which they differ are arrays [L]."""
        graphdef, weights = nnx.split(self.layers)
        windows, ropes, layout = self.spec.windows, self.spec.ropes, self.spec.cache_layout
        groups, indices = zip(*layout.places, strict=True)
        varying: dict[str, jax.Array] = {"index": jnp.array(indices)}
        if len(layout.windows) > 1:
            varying["group"] = jnp.array(groups)
        if len(set(windows)) > 1:
            assert attention.array_windows, f"{attention.name} needs unrolled layers"
            varying["window"] = jnp.array([NO_WINDOW if w is None else w for w in windows])
        if len(ropes) > 1:
            varying["rope"] = jnp.array([ropes.index(facts.rope) for facts in self.spec.layers])
        stacked_rotations = [jnp.stack(parts) for parts in zip(*rotations, strict=True)]

        # The cache is part of the carry: XLA would copy it as an input and output of each layer.
        def body(carry: tuple[Hidden, KVCache], inputs: Any) -> tuple[tuple[Hidden, KVCache], None]:
            x, kv = carry
            facts, weights = inputs
            layer = cast(Layer, nnx.merge(graphdef, weights))
            cos, sin = (parts[facts.get("rope", 0)] for parts in stacked_rotations)
            window = facts.get("window", windows[0])
            own = meta.of(facts.get("group", 0))
            step = LayerContext(own, attention, facts["index"], window, cos, sin)
            with jax.named_scope("layer"):
                return layer(x, kv, step), None

        carry, _ = lax.scan(body, (x, kv), (varying, weights))
        return carry


def _stacked(layer: Layer, num_layers: int) -> Layer:
    """Returns the layer with a leading axis "layers" of size L on every parameter."""
    graphdef, state = nnx.split(layer)

    def stack(one: ArraySpec) -> ArraySpec:
        return ArraySpec((("layers", num_layers), *one.axes), one.dtype)

    return nnx.merge(graphdef, jax.tree.map(stack, state))

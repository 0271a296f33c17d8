"""The blocks that decoder models are made of: parameters in nnx modules, math in functions.

Dimensions: T tokens of a step, D hidden size, F intermediate size, H query heads, K key-value
heads, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.ops.elementwise import ACTIVATIONS, rms_norm
from jaxserve.ops.rope import rotate


class StepContext(NamedTuple):
    """What every layer needs to know about the step.

    Attributes:
      meta: where the tokens belong.
      cos, sin: f32[T, head_dim / 2], the rotation of each token.
      attention: how the cache is written and read.
    """

    meta: AttentionMeta
    cos: jax.Array
    sin: jax.Array
    attention: AttentionBackend


def parameter(*shape: int, parts: tuple[tuple[str, int], ...] = ()) -> nnx.Param:
    """An array to be loaded; float32 stands for the dtype, which is chosen when it is.

    ``parts`` cuts the last axis: name and size of each piece, where a checkpoint has them apart.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), parts=parts)


class Linear(nnx.Module):
    """``x @ weight + bias``; several layers in one if ``outputs`` has the size of each by name."""

    def __init__(
        self, num_inputs: int, outputs: int | dict[str, int], *, bias: bool = False
    ) -> None:
        cut = () if isinstance(outputs, int) else tuple(outputs.items())
        num_outputs = outputs if isinstance(outputs, int) else sum(outputs.values())
        # [in, out], the other way round than in a checkpoint: twice as fast for few tokens.
        self.weight = parameter(num_inputs, num_outputs, parts=cut)
        self.bias = parameter(num_outputs, parts=cut) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...]
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """See `ops.norm.rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = parameter(size)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)


class Embed(nnx.Module):
    """Token vectors; also an output head, with the same layout: [V, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        self.weight = parameter(spec.vocab_size, spec.hidden_size)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32[T] -> [T, D]."""
        return self.weight[...][tokens]

    def logits(self, x: jax.Array) -> jax.Array:
        """[T, D] -> f32[T, V]."""
        return jnp.einsum("td,vd->tv", x, self.weight[...], preferred_element_type=jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, spec: ModelSpec) -> None:
        queries = spec.num_heads * spec.head_dim
        keys = spec.num_kv_heads * spec.head_dim
        self.num_heads = spec.num_heads
        self.head_dim = spec.head_dim
        self.sizes = (queries, keys, keys)
        self.qkv = Linear(
            spec.hidden_size, {"q": queries, "k": keys, "v": keys}, bias=spec.qkv_bias
        )
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.output = Linear(queries, spec.hidden_size, bias=spec.attention_output_bias)

    def __call__(
        self,
        x: jax.Array,
        kv: KVCache,
        layer: jax.Array | int,
        step: StepContext,
        *,
        window: int | None,
    ) -> tuple[jax.Array, KVCache]:
        """[T, D] -> [T, D] and the cache with the step's keys and values in it."""
        num_tokens = x.shape[0]
        q_end, k_end = self.sizes[0], self.sizes[0] + self.sizes[1]
        q, k, v = jnp.split(self.qkv(x), (q_end, k_end), axis=-1)
        q, k, v = (part.reshape(num_tokens, -1, self.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        kv = step.attention.write(kv, layer, k, v, step.meta)
        attended = step.attention.attend(
            q, kv, layer, step.meta, scale=self.head_dim**-0.5, window=window
        )
        return self.output(attended.reshape(num_tokens, -1)), kv


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, spec: ModelSpec) -> None:
        size = spec.intermediate_size
        self.activation = spec.activation
        self.gate_up = Linear(spec.hidden_size, {"gate": size, "up": size}, bias=spec.mlp_bias)
        self.down = Linear(size, spec.hidden_size, bias=spec.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class DecoderLayer(nnx.Module):
    """Attention, then MLP, each on the normalised stream and added back to it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def __call__(
        self,
        x: jax.Array,
        kv: KVCache,
        layer: jax.Array | int,
        step: StepContext,
        *,
        window: int | None,
    ) -> tuple[jax.Array, KVCache]:
        """[T, D] -> [T, D] and the cache; ``layer`` says which of the cache's layers is ours."""
        with jax.named_scope("attention"):
            out, kv = self.attention(self.attention_norm(x), kv, layer, step, window=window)
            x = x + out
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x))
        return x, kv

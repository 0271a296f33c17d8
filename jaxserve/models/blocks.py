"""The layers of decoder models: nnx modules that hold parameters and call the ops.

Dimensions in docstrings of models and ops: T tokens of a step, R rows, N query heads, K key-value
heads, H head_dim, D model width (hidden_size), F MLP width (intermediate_size), V vocabulary, L
layers, B blocks, S block_size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache, LayerIndex
from jaxserve.ops.elementwise import ACTIVATIONS, rms_norm
from jaxserve.ops.rope import rotate

Hidden = Float[Array, "tokens hidden"]
"""The residual stream or a part of it, [T, D], in the dtype of the parameters."""


class StepContext(NamedTuple):
    """The inputs of a step that every layer needs.

    Attributes:
      meta: maps each token to its request and to its slot in the cache.
      cos, sin: f32[T, H / 2], the rotation of each token.
      attention: the backend that writes and reads the cache.
    """

    meta: AttentionMeta
    cos: Float32[Array, "tokens half_head_dim"]
    sin: Float32[Array, "tokens half_head_dim"]
    attention: AttentionBackend


def parameter(*shape: int, parts: tuple[tuple[str, int], ...] = ()) -> nnx.Param:
    """Returns a parameter without values, to be loaded.

    Args:
      shape: the shape. The dtype float32 is a placeholder; `models.loading` chooses the real one.
      parts: for a fused parameter, name and size of each part of the last axis. A checkpoint stores
        each part as a separate tensor.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), parts=parts)


class Linear(nnx.Module):
    """``x @ weight + bias``, or several such layers fused into one.

    Args:
      num_inputs: size of the input.
      outputs: size of the output; for fused layers, the size of each output by name.
      bias: adds a bias.
    """

    def __init__(
        self, num_inputs: int, outputs: int | dict[str, int], *, bias: bool = False
    ) -> None:
        parts = () if isinstance(outputs, int) else tuple(outputs.items())
        num_outputs = outputs if isinstance(outputs, int) else sum(outputs.values())
        # Checkpoints store [out, in]. The transpose [in, out] is twice as fast for few tokens.
        self.weight = parameter(num_inputs, num_outputs, parts=parts)
        self.bias = parameter(num_outputs, parts=parts) if bias else None

    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        y = x @ self.weight[...]
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """`ops.elementwise.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = parameter(size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.weight[...], eps=self.eps)


class Embed(nnx.Module):
    """The token embedding [V, D], or an output head, which has the same layout."""

    def __init__(self, spec: ModelSpec) -> None:
        self.weight = parameter(spec.vocab_size, spec.hidden_size)

    def __call__(self, tokens: Int32[Array, " tokens"]) -> Hidden:
        """Returns the vectors [T, D] of tokens i32[T]."""
        return self.weight[...][tokens]

    def logits(self, x: Hidden) -> Float32[Array, "tokens vocab"]:
        """Returns the logits f32[T, V] of hidden states [T, D]."""
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
        x: Hidden,
        kv: KVCache,
        layer: LayerIndex,
        step: StepContext,
        *,
        window: int | None,
    ) -> tuple[Hidden, KVCache]:
        """Returns the output [T, D], and the cache with the step's keys and values.

        Args:
          x: [T, D], normalised.
          kv: the cache.
          layer: the layer of the cache that belongs to this module, in [0, L).
          step: the inputs that all layers share.
          window: a query sees the latest ``window`` positions, including its own; None for all.
        """
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

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class DecoderLayer(nnx.Module):
    """Attention, then MLP. Each reads the normalised residual stream and adds its output to it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def __call__(
        self,
        x: Hidden,
        kv: KVCache,
        layer: LayerIndex,
        step: StepContext,
        *,
        window: int | None,
    ) -> tuple[Hidden, KVCache]:
        """Returns the residual stream [T, D] and the cache; arguments as in `Attention`."""
        with jax.named_scope("attention"):
            out, kv = self.attention(self.attention_norm(x), kv, layer, step, window=window)
            x = x + out
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x))
        return x, kv

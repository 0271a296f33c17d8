"""The layers of decoder models: nnx modules that hold parameters and call the ops.

Dimensions in docstrings of models and ops: T tokens of a step, R rows, N query heads, K key-value
heads, H head_dim, D model width (hidden_size), F MLP width (intermediate_size), V vocabulary, L
layers, B blocks, S block_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import (
    AttentionBackend,
    AttentionMeta,
    KVCache,
    LayerIndex,
    Window,
)
from jaxserve.ops.elementwise import ACTIVATIONS, rms_norm
from jaxserve.ops.rope import rotate

Hidden = Float[Array, "tokens hidden"]
"""The residual stream or a part of it, [T, D], in the dtype of the parameters."""


class LayerContext(NamedTuple):
    """The inputs of a step that one layer needs.

    Attributes:
      meta: maps each token to its request and to its slot in the group of the layer.
      attention: the backend that writes and reads the cache.
      index: the layer of the cache that belongs to this layer, in [0, L); see `CacheLayout`.
      window: a query sees the latest ``window`` positions, its own included; None: all. An array
        i32[] inside a loop over layers with different windows, where `NO_WINDOW` means all.
      cos, sin: f32[T, H / 2], the rotation of each token.
    """

    meta: AttentionMeta
    attention: AttentionBackend
    index: LayerIndex
    window: Window
    cos: Float32[Array, "tokens half_head_dim"]
    sin: Float32[Array, "tokens half_head_dim"]


class Layer(nnx.Module):
    """One layer of a decoder, the base of the layers that families bring as `CausalLM.LAYER`."""

    def __init__(self, spec: ModelSpec) -> None:
        """Builds the modules of the layer from the spec of its family."""
        raise NotImplementedError(type(self))

    def __call__(self, x: Hidden, kv: KVCache, step: LayerContext) -> tuple[Hidden, KVCache]:
        """Returns the residual stream [T, D], and the cache with the step's keys and values."""
        raise NotImplementedError(type(self))


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

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = parameter(size)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.weight[...], eps=self.eps, offset=self.offset)


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
    """Multi-head attention with grouped key-value heads over the paged cache.

    Args:
      spec: the sizes.
      qkv_bias, output_bias: the linear layers that have a bias.
      qk_norm: makes the norms of the queries and keys of each head; None: they have none.
      scale: multiplies the scores; None: ``H ** -0.5``.
      soft_cap: see `ops.attention.AttendFn`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Callable[[int, float], RMSNorm] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        queries = spec.num_heads * spec.head_dim
        keys = spec.num_kv_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.sizes = (queries, keys, keys)
        self.qkv = Linear(spec.hidden_size, {"q": queries, "k": keys, "v": keys}, bias=qkv_bias)
        self.q_norm = qk_norm(spec.head_dim, spec.norm_eps) if qk_norm else None
        self.k_norm = qk_norm(spec.head_dim, spec.norm_eps) if qk_norm else None
        self.output = Linear(queries, spec.hidden_size, bias=output_bias)

    def __call__(self, x: Hidden, kv: KVCache, step: LayerContext) -> tuple[Hidden, KVCache]:
        """Returns the output [T, D] for normalised ``x``, and the cache; see `Layer`."""
        num_tokens = x.shape[0]
        q_end, k_end = self.sizes[0], self.sizes[0] + self.sizes[1]
        q, k, v = jnp.split(self.qkv(x), (q_end, k_end), axis=-1)
        q, k, v = (part.reshape(num_tokens, -1, self.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        kv = step.attention.write(kv, step.index, k, v, step.meta)
        attended = step.attention.attend(
            q,
            kv,
            step.index,
            step.meta,
            scale=self.scale,
            window=step.window,
            soft_cap=self.soft_cap,
        )
        return self.output(attended.reshape(num_tokens, -1)), kv


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; ``activation`` is a key of `ACTIVATIONS`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.activation = activation
        self.gate_up = Linear(hidden_size, parts, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)

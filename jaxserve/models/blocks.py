"""The layers of decoder models: nnx modules that hold parameters and call the ops.

Dimensions in docstrings of models and ops: T tokens of a step, R rows, N query heads, K key-value
heads, H head_dim, D model width (hidden_size), F MLP width (intermediate_size), V vocabulary, L
layers, B blocks, S block_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import Parts, Weight, parameter
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache, LayerIndex, Window
from jaxserve.ops.elementwise import ACTIVATIONS, rms_norm
from jaxserve.ops.linear import MODEL_AXIS, Axes, Matrix
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


class Linear(Weight):
    """``x @ weight + bias``, or several such layers fused into one.

    The weight has the axes of the inputs, then those of the outputs. Checkpoints store [out, in];
    the transpose is twice as fast for few tokens on a CPU. If the inputs are cut across devices,
    the product of each device is one term of the sum, and all devices get the sum.

    Args:
      inputs, outputs: the logical axes; ``x`` and the result have them as one, [T, I] and [T, O].
      parts: for fused layers, the axis of ``outputs`` along which they lie.
      bias: adds a bias.
    """

    def __init__(
        self, inputs: Axes, outputs: Axes, *, parts: Parts | None = None, bias: bool = False
    ) -> None:
        super().__init__(Matrix(inputs, outputs), parts)
        self.bias = parameter(outputs, parts=parts, name="bias") if bias else None

    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        y = self.format.matmul(x, self.leaves)
        if self.is_cut(self.matrix.inputs):
            y = lax.psum(y, MODEL_AXIS)
        return y if self.bias is None else y + self.bias[...].reshape(-1)


class RMSNorm(nnx.Module):
    """`ops.elementwise.rms_norm` with its weight; ``axis`` is the name of the normalised axis."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, axis: str = "embed") -> None:
        self.weight = parameter(((axis, size),))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.weight[...], eps=self.eps, offset=self.offset)


class Embed(Weight):
    """The token embedding [V, D], or an output head, which has the same layout.

    If the vocabulary is cut across devices, each of them has the vectors of its tokens.

    Args:
      spec: the sizes.
      dtype: dtype of the vectors, a numpy name.
    """

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        inputs, outputs = (("embed", spec.hidden_size),), (("vocab", spec.vocab_size),)
        super().__init__(Matrix(inputs, outputs, outputs_first=True))
        self.dtype = dtype

    def __call__(self, tokens: Int32[Array, " tokens"]) -> Hidden:
        """Returns the vectors [T, D] of tokens i32[T]."""
        if not self.is_cut(self.matrix.outputs):
            return self.format.rows(tokens, self.leaves, dtype=self.dtype)
        size = self.matrix.outputs[0][1] // lax.axis_size(MODEL_AXIS)
        own = tokens - lax.axis_index(MODEL_AXIS) * size
        is_own = (own >= 0) & (own < size)
        x = self.format.rows(jnp.where(is_own, own, 0), self.leaves, dtype=self.dtype)
        return lax.psum(jnp.where(is_own[:, None], x, 0), MODEL_AXIS)

    def logits(self, x: Hidden) -> Float32[Array, "tokens vocab"]:
        """Returns the logits f32[T, V] of hidden states [T, D]."""
        y = self.format.matmul(x, self.leaves, outputs_first=True, dtype="float32")
        if self.is_cut(self.matrix.outputs):
            y = lax.all_gather(y, MODEL_AXIS, axis=1, tiled=True)
        return y


class Attention(nnx.Module):
    """Multi-head attention with grouped key-value heads over the paged cache.

    The fused weight of queries, keys and values has the axes [D, K, G + 2, H]: for each key-value
    head the G heads of its queries, its key, its value. So any number of key-value heads can be on
    a device, with all that belongs to them.

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
        qk_norm: Callable[..., RMSNorm] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        kv_heads, head_dim = ("kv_heads", spec.num_kv_heads), ("head_dim", spec.head_dim)
        embed, group = ("embed", spec.hidden_size), spec.num_heads // spec.num_kv_heads
        self.group = group
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.qkv = Linear(
            (embed,),
            (kv_heads, ("qkv", group + 2), head_dim),
            parts=Parts("qkv", (("q", group), ("k", 1), ("v", 1))),
            bias=qkv_bias,
        )
        head = {"size": spec.head_dim, "eps": spec.norm_eps, "axis": "head_dim"}
        self.q_norm = qk_norm(**head) if qk_norm else None
        self.k_norm = qk_norm(**head) if qk_norm else None
        self.output = Linear((kv_heads, ("group", group), head_dim), (embed,), bias=output_bias)

    def __call__(self, x: Hidden, kv: KVCache, step: LayerContext) -> tuple[Hidden, KVCache]:
        """Returns the output [T, D] for normalised ``x``, and the cache; see `Layer`."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x).reshape(num_tokens, -1, self.group + 2, self.head_dim)
        q = qkv[:, :, : self.group].reshape(num_tokens, -1, self.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
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
        embed, mlp = ("embed", hidden_size), ("mlp", intermediate_size)
        parts = Parts("gate_up", (("gate", 1), ("up", 1)))
        self.activation = activation
        self.gate_up = Linear((embed,), (("gate_up", 2), mlp), parts=parts, bias=bias)
        self.down = Linear((mlp,), (embed,), bias=bias)

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)

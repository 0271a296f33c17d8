"""Llama 2 and 3, SmolLM2, and every other model whose architecture is LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from jaxserve.checkpoint.gguf_config import Get, GGUFNames
from jaxserve.checkpoint.mapping import Rule, transpose
from jaxserve.models.blocks import Attention, GatedMLP, Hidden, Layer, LayerContext, RMSNorm
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.config_values import flag, size
from jaxserve.models.hf_config import activation, settle, shared_fields
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import KVCache

PREFIX = "model.layers.{layer}."
"""The names of the tensors of a layer begin like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(ModelSpec):
    """The shape of a Llama.

    Attributes:
      activation: a key of `ops.elementwise.ACTIVATIONS`.
      qkv_bias, attention_output_bias, mlp_bias: the linear layers that have a bias.
      qk_norm: normalises the queries and keys of each head.
    """

    intermediate_size: int
    activation: str
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool = False


class LlamaLayer(Layer):
    """Attention, then MLP; each reads the normalised residual stream and adds to the stream."""

    def __init__(self, spec: LlamaSpec) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(
            spec,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.attention_output_bias,
            qk_norm=RMSNorm if spec.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(
            spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias
        )

    def __call__(self, x: Hidden, kv: KVCache, step: LayerContext) -> tuple[Hidden, KVCache]:
        """Returns the residual stream [T, D] and the cache; see `Layer`."""
        with jax.named_scope("attention"):
            out, kv = self.attention(self.attention_norm(x), kv, step)
            x = x + out
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x))
        return x, kv


def _mistral(get: Get) -> dict[str, Any]:
    """Returns the class of Mistral models, whose GGUF files are "llama" with a window."""
    if not get("attention.sliding_window", 0):
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


class LlamaForCausalLM(CausalLM):
    """The family whose tensor names most other families share.

    Class attributes of families with the same layers:
      HF_DEFAULTS: the values of keys that are missing in a config.json of the family.
      HF_FIXED: values that override config.json, by its keys and ``attention_output_bias``.
    """

    LAYER = LlamaLayer
    GGUF = GGUFNames("LlamaForCausalLM", "llama", rotates_pairs=True, config=_mistral)
    RULES = (
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule(PREFIX + "input_layernorm.weight", "layers.*.attention_norm.weight"),
        Rule(PREFIX + "self_attn.{part}_proj.weight", "layers.*.attention.qkv.weight", transpose),
        Rule(PREFIX + "self_attn.{part}_proj.bias", "layers.*.attention.qkv.bias"),
        Rule(PREFIX + "self_attn.o_proj.weight", "layers.*.attention.output.weight", transpose),
        Rule(PREFIX + "self_attn.o_proj.bias", "layers.*.attention.output.bias"),
        Rule(PREFIX + "post_attention_layernorm.weight", "layers.*.mlp_norm.weight"),
        Rule(PREFIX + "mlp.{part}_proj.weight", "layers.*.mlp.gate_up.weight", transpose),
        Rule(PREFIX + "mlp.{part}_proj.bias", "layers.*.mlp.gate_up.bias"),
        Rule(PREFIX + "mlp.down_proj.weight", "layers.*.mlp.down.weight", transpose),
        Rule(PREFIX + "mlp.down_proj.bias", "layers.*.mlp.down.bias"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
    )
    IGNORED = (
        "model.rotary_emb.inv_freq",
        PREFIX + "self_attn.rotary_emb.inv_freq",
        PREFIX + "self_attn.rotary_emb.cos_cached",
        PREFIX + "self_attn.rotary_emb.sin_cached",
    )
    COPIES_OF_TIED = ("lm_head.weight",)
    HF_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    HF_FIXED: ClassVar[Mapping[str, Any]] = {"sliding_window": None, "layer_types": None}

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> LlamaSpec:
        """See `CausalLM.read_spec`."""
        config = settle(config, defaults=cls.HF_DEFAULTS, fixed=cls.HF_FIXED)
        bias = flag(config, "attention_bias")
        return LlamaSpec(
            **shared_fields(config),
            intermediate_size=size(config, "intermediate_size"),
            activation=activation(config),
            qkv_bias=bias,
            attention_output_bias=flag(config, "attention_output_bias", default=bias),
            mlp_bias=flag(config, "mlp_bias"),
        )

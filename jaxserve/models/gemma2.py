"""Gemma 2: norms before and after each part of a layer, capped scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.checkpoint.gguf_config import Get, GGUFNames
from jaxserve.checkpoint.mapping import Rule
from jaxserve.models.blocks import Attention, GatedMLP, Hidden, Layer, LayerContext, RMSNorm
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.config_values import optional_real, real, size
from jaxserve.models.hf_config import activation, settle, shared_fields
from jaxserve.models.llama import PREFIX, LlamaForCausalLM
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import KVCache

GemmaNorm = partial(RMSNorm, offset=1.0)
"""An RMS norm whose checkpoints store the weight minus 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Spec(ModelSpec):
    """The shape of a Gemma 2.

    Attributes:
      activation: a key of `ops.elementwise.ACTIVATIONS`.
      attention_scale: multiplies the scores.
      attention_soft_cap: see ``soft_cap`` of `ops.attention.AttendFn`.
      logit_soft_cap: bounds the logits in the same way; None: no cap.
      qk_norm: normalises the queries and keys of each head, as Gemma 3 does.
    """

    intermediate_size: int
    activation: str
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    qk_norm: bool = False


class Gemma2Layer(Layer):
    """Attention, then MLP; each is normalised before and after, and added to the stream."""

    def __init__(self, spec: Gemma2Spec) -> None:
        norm = partial(GemmaNorm, spec.hidden_size, spec.norm_eps)
        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(
            spec,
            scale=spec.attention_scale,
            soft_cap=spec.attention_soft_cap,
            qk_norm=GemmaNorm if spec.qk_norm else None,
        )
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.activation)

    def __call__(self, x: Hidden, kv: KVCache, step: LayerContext) -> tuple[Hidden, KVCache]:
        """Returns the residual stream [T, D] and the cache; see `Layer`."""
        with jax.named_scope("attention"):
            out, kv = self.attention(self.attention_norm(x), kv, step)
            x = x + self.attention_out_norm(out)
        with jax.named_scope("mlp"):
            x = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return x, kv


HF_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Values of keys that are missing in a config.json of Gemma 2 or 3."""

GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""`GGUFNames.layer_tensors` of Gemma 2 and 3."""


def gguf_query_scalar(get: Get, *, layers_of_27b: int) -> int:
    """Returns ``query_pre_attn_scalar``, which GGUF files lack.

    It is the size of a head, except in the models with 27 billion parameters, where it is
    ``hidden_size / num_attention_heads``. llama.cpp recognises those by their number of layers too.
    """
    ratio = get("embedding_length") // get("attention.head_count")
    is_27b = get("block_count") == layers_of_27b
    return ratio if is_27b else get("attention.key_length", ratio)


class Gemma2ForCausalLM(CausalLM):
    """The output head is the embedding, whose vectors are scaled by ``sqrt(D)`` as inputs."""

    LAYER = Gemma2Layer
    GGUF = GGUFNames(
        "Gemma2ForCausalLM",
        "gemma2",
        norm_offset=1.0,
        layer_tensors=GGUF_NORMS,
        config=lambda get: {
            "query_pre_attn_scalar": gguf_query_scalar(get, layers_of_27b=46),
            "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": get("final_logit_softcapping", 30.0),
            "sliding_window": get("attention.sliding_window", 4096),
        },
    )
    spec: Gemma2Spec
    RULES = (
        *(r for r in LlamaForCausalLM.RULES if "post_attention_layernorm" not in r.name),
        Rule(PREFIX + "post_attention_layernorm.weight", "layers.*.attention_out_norm.weight"),
        Rule(PREFIX + "pre_feedforward_layernorm.weight", "layers.*.mlp_norm.weight"),
        Rule(PREFIX + "post_feedforward_layernorm.weight", "layers.*.mlp_out_norm.weight"),
    )
    IGNORED = LlamaForCausalLM.IGNORED
    COPIES_OF_TIED = LlamaForCausalLM.COPIES_OF_TIED

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> Gemma2Spec:
        """See `CausalLM.read_spec`. Windows are in the layers 0, 2, 4, ... unless listed."""
        defaults = {
            **HF_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
        config = settle(config, defaults=defaults)
        kinds = ["sliding_attention", "full_attention"]
        count = size(config, "num_hidden_layers")
        config.setdefault("layer_types", [kinds[i % 2] for i in range(count)])
        return Gemma2Spec(**shared_fields(config), **gemma_fields(config))

    def final_norm(self, spec: ModelSpec) -> RMSNorm:
        """See `CausalLM.final_norm`."""
        return GemmaNorm(spec.hidden_size, spec.norm_eps)

    def embedded(self, tokens: Int32[Array, " tokens"]) -> Hidden:
        """See `CausalLM.embedded`."""
        x = self.embed(tokens)
        # transformers rounds the factor to the dtype of the weights, too.
        return x * jnp.asarray(self.spec.hidden_size**0.5, x.dtype)

    def logits(self, hidden: Hidden) -> Float32[Array, "tokens vocab"]:
        """See `CausalLM.logits`."""
        logits, cap = super().logits(hidden), self.spec.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def gemma_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields that `Gemma2Spec` adds to `ModelSpec` from a settled config.json."""
    return {
        "intermediate_size": size(config, "intermediate_size"),
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": real(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_soft_cap": optional_real(config, "attn_logit_softcapping"),
        "logit_soft_cap": optional_real(config, "final_logit_softcapping"),
    }

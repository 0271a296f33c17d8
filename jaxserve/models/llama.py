"""Llama 2 and 3, SmolLM2, and every other model whose architecture is LlamaForCausalLM."""

from __future__ import annotations

from jaxserve.checkpoint.mapping import Rule, transpose
from jaxserve.models.causal_lm import CausalLM

LAYER = "model.layers.{layer}."


class LlamaForCausalLM(CausalLM):
    """The family whose tensor names most other families share."""

    RULES = (
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule(LAYER + "input_layernorm.weight", "layers.*.attention_norm.weight"),
        Rule(LAYER + "self_attn.{part}_proj.weight", "layers.*.attention.qkv.weight", transpose),
        Rule(LAYER + "self_attn.{part}_proj.bias", "layers.*.attention.qkv.bias"),
        Rule(LAYER + "self_attn.o_proj.weight", "layers.*.attention.output.weight", transpose),
        Rule(LAYER + "self_attn.o_proj.bias", "layers.*.attention.output.bias"),
        Rule(LAYER + "post_attention_layernorm.weight", "layers.*.mlp_norm.weight"),
        Rule(LAYER + "mlp.{part}_proj.weight", "layers.*.mlp.gate_up.weight", transpose),
        Rule(LAYER + "mlp.{part}_proj.bias", "layers.*.mlp.gate_up.bias"),
        Rule(LAYER + "mlp.down_proj.weight", "layers.*.mlp.down.weight", transpose),
        Rule(LAYER + "mlp.down_proj.bias", "layers.*.mlp.down.bias"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
    )
    IGNORED = (
        "model.rotary_emb.inv_freq",
        LAYER + "self_attn.rotary_emb.inv_freq",
        LAYER + "self_attn.rotary_emb.cos_cached",
        LAYER + "self_attn.rotary_emb.sin_cached",
    )
    COPIES_OF_TIED = ("lm_head.weight",)
    HF_FIXED = {"sliding_window": None, "layer_types": None}

"""Qwen3: Llama with an RMS norm on the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.checkpoint.mapping import Rule
from jaxserve.models.llama import PREFIX, LlamaForCausalLM, LlamaSpec


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Windows are off by default; if enabled, only the upper layers have them."""

    GGUF = GGUFNames("Qwen3ForCausalLM", "qwen3")
    RULES = (
        *LlamaForCausalLM.RULES,
        Rule(PREFIX + "self_attn.q_norm.weight", "layers.*.attention.q_norm.weight"),
        Rule(PREFIX + "self_attn.k_norm.weight", "layers.*.attention.k_norm.weight"),
    )
    HF_DEFAULTS = {
        "head_dim": 128,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    HF_FIXED = {"mlp_bias": False}

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> LlamaSpec:
        """See `CausalLM.read_spec`."""
        return replace(super().read_spec(config), qk_norm=True)

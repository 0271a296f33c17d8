"""Mistral: Llama with sliding-window attention."""

from __future__ import annotations

from jaxserve.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Every layer has the window, unless config.json sets it to null or lists layer types."""

    HF_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
    HF_FIXED = {"attention_bias": False, "mlp_bias": False}

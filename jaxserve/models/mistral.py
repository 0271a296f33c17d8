"""Mistral: Llama whose queries see a window."""

from __future__ import annotations

from jaxserve.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Every layer has the window, unless config.json says null or lists the kinds of layers."""

    HF_DEFAULTS = {"sliding_window": 4096}
    HF_FIXED = {"attention_bias": False, "mlp_bias": False}

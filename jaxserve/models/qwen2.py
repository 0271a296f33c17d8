"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Windows are off by default; if enabled, only the upper layers have them."""

    GGUF = GGUFNames("Qwen2ForCausalLM", "qwen2")
    HF_DEFAULTS = {
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    HF_FIXED = {"attention_bias": True, "attention_output_bias": False, "mlp_bias": False}

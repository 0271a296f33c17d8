"""GGUF metadata and tensor names in Hugging Face terms."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a GGUF architecture is called elsewhere.

    ``rotates_pairs``: the rows of the q and k projections are in the order of rotary embeddings
    that turn neighbours; in Hugging Face checkpoints they turn the two halves of a head.
    """

    hf_class: str
    model_type: str
    rotates_pairs: bool


LLAMA = Architecture("LlamaForCausalLM", "llama", rotates_pairs=True)
# GGUF has no architecture of its own for Mistral models: they are "llama" with a window.
MISTRAL = Architecture("MistralForCausalLM", "mistral", rotates_pairs=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", rotates_pairs=False),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", rotates_pairs=False),
}

# What all models of the Llama 3 family share of their rope scaling.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is configuration: what each rotary frequency is divided by."""

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Tokens that end a turn or a text, by name. Files often name only one of them as the end token.
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
)
CONTROL_TOKEN = 3

SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

RECOMMENDED: Mapping[str, Mapping[str, float]] = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
}
"""How to sample from families whose files do not say it, by ``general.basename``: from their model
cards. Small models write nonsense at temperature 1."""


def architecture(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises UnsupportedModelError if it is not a known one."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; expected one of "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if metadata.get(f"{name}.expert_count"):
        raise UnsupportedModelError(f"GGUF architecture {name!r} with experts is not supported")
    if metadata.get(f"{name}.attention.sliding_window"):
        return MISTRAL if name == "llama" else ARCHITECTURES[name]
    return ARCHITECTURES[name]


def hf_tensor_name(name: str) -> str:
    """The Hugging Face name of a tensor. Raises CheckpointError if it is not a known one."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if part in LAYER_TENSOR_NAMES:
            return f"model.layers.{layer}.{LAYER_TENSOR_NAMES[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    if part in TENSOR_NAMES and kind in ("weight", "bias"):
        return f"{TENSOR_NAMES[part]}.{kind}"
    raise CheckpointError(f"tensor {name} is none that the model architecture has")


def hf_config(
    metadata: Metadata,
    *,
    vocab_size: int,
    tensor_names: Container[str],
    rope_factors: Sequence[float] | None,
) -> dict[str, Any]:
    """The contents of config.json for a GGUF file.

    Rotary embeddings are described in the form of transformers 5, ``rope_parameters``. A file may
    store a number for each frequency, by which it is divided. Those of Llama 3 become the rope type
    ``llama3``; any others are given as they are, with ``"rope_type": "factors"`` and a list of
    head_dim / 2 numbers under ``factors``, which is no type of transformers.

    Args:
      metadata: of the file.
      vocab_size: rows of the embedding.
      tensor_names: GGUF names of the tensors in the file.
      rope_factors: contents of the tensor ``ROPE_FACTORS``, if there is one.

    Raises:
      CheckpointError: a key that is needed is missing.
      UnsupportedModelError: the architecture or its rope scaling is not supported.
    """
    known = architecture(metadata)
    prefix = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise CheckpointError(f"GGUF metadata lacks {prefix}.{key}")
        return value

    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [known.hf_class],
        "model_type": known.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(metadata, rope_factors),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "attention_output_bias": "blk.0.attn_output.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_names,
        "vocab_size": vocab_size,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if window := metadata.get(f"{prefix}.attention.sliding_window"):
        config["sliding_window"] = window
    return config


def _rope_parameters(metadata: Metadata, factors: Sequence[float] | None) -> dict[str, Any]:
    prefix = f"{metadata['general.architecture']}.rope"
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.get(f"{prefix}.freq_base", 10000.0),
    }
    kind = metadata.get(f"{prefix}.scaling.type", "none")
    factor = metadata.get(f"{prefix}.scaling.factor", 1.0)
    if factors is not None:
        llama3 = {"rope_type": "llama3", "factor": max(factors), **LLAMA3_ROPE}
        rope |= (
            llama3
            if np.allclose(factors, _llama3_factors(llama3, rope["rope_theta"], len(factors)))
            else {"rope_type": "factors", "factors": list(factors)}
        )
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        attention_factor = metadata.get(f"{prefix}.scaling.attn_factor", 1.0)
        if attention_factor != 1.0:  # GGUF multiplies by what Hugging Face has as the default
            rope["attention_factor"] = attention_factor * (1 + 0.1 * math.log(factor))
        for key, hf_key in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if (value := metadata.get(f"{prefix}.scaling.{key}")) is not None:
                rope[hf_key] = value
    elif kind != "none":
        raise UnsupportedModelError(
            f"GGUF rope scaling {kind!r} is not supported; expected linear, yarn or none"
        )
    return rope


def _llama3_factors(llama3: dict[str, Any], theta: float, count: int) -> np.ndarray:
    """What a GGUF file stores for the rope type ``llama3``, ``f64[count]``.

    Short waves are kept, long ones are slowed down by ``factor``, and in between it is a mixture.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    low, high = llama3["low_freq_factor"], llama3["high_freq_factor"]
    turns = llama3["original_max_position_embeddings"] / wavelengths
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / llama3["factor"] + kept)


def hf_generation_config(metadata: Metadata) -> dict[str, Any]:
    """The contents of generation_config.json for a GGUF file.

    ``eos_token_id`` is a list: the end token of the file, its end of turn and message, and tokens
    that by their name are one. Sampling is what the file says, else what is in `RECOMMENDED`.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL_TOKEN and token in END_TOKENS
    ]
    said = {name: metadata[key] for key, name in SAMPLING_KEYS.items() if key in metadata}
    family = str(metadata.get("general.basename"))
    config: dict[str, Any] = said or dict(RECOMMENDED.get(family, {}))
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config

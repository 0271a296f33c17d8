"""Translates GGUF metadata and tensor names to those of Hugging Face."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError

Metadata = dict[str, Any]

Get = Callable[..., Any]
"""Reads a key of the architecture: ``get("block_count")``, or with a default for a missing key.

Raises CheckpointError if the key is missing and there is no default.
"""


def _nothing(get: Get) -> dict[str, Any]:
    """Returns no keys: `GGUFNames.config` of most families."""
    return {}


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """The facts in which the GGUF files of a family differ from its Hugging Face checkpoints.

    Attributes:
      hf_class: the architecture in config.json.
      model_type: the same key of config.json.
      rotates_pairs: the rows of the q and k projections are ordered for rotary embeddings that
        rotate adjacent pairs. Hugging Face checkpoints rotate the two halves of a head.
      norm_offset: the number that the converter adds to the weights of norms.
      layer_tensors: part of a GGUF tensor name -> part of the Hugging Face name, for the tensors
        whose names differ from `LAYER_TENSOR_NAMES`.
      config: returns keys of config.json that replace or extend those that all families share.
    """

    hf_class: str
    model_type: str
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Get], dict[str, Any]] = _nothing


# Rope scaling that all models of the Llama 3 family share.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds the divisor of each rotary frequency, which is part of the config."""

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

# Tokens that end a turn or a document. Files often declare only one of them as the end token.
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
)
CONTROL_TOKEN = 3
"""The type of control tokens in ``tokenizer.ggml.token_type``."""

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
"""Sampling defaults by ``general.basename``, from model cards, for files without any.

At the general default, temperature 1, small models write nonsense.
"""


def architecture(metadata: Metadata) -> str:
    """Returns the name of the architecture of a file.

    Raises:
      UnsupportedModelError: it is a mixture of experts.
    """
    name = str(metadata.get("general.architecture"))
    if metadata.get(f"{name}.expert_count"):
        raise UnsupportedModelError(f"GGUF architecture {name!r} with experts is not supported")
    return name


def hf_tensor_name(name: str, layer_tensors: Mapping[str, str]) -> str:
    """Returns the Hugging Face name of a tensor; ``layer_tensors`` are those of `GGUFNames`.

    Raises:
      CheckpointError: no tensor of the architecture has this name.
    """
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        names = {**LAYER_TENSOR_NAMES, **layer_tensors}
        if part in names:
            return f"model.layers.{layer}.{names[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    if part in TENSOR_NAMES and kind in ("weight", "bias"):
        return f"{TENSOR_NAMES[part]}.{kind}"
    raise CheckpointError(f"tensor {name} is not part of the model architecture")


def hf_config(
    metadata: Metadata,
    names: GGUFNames,
    *,
    vocab_size: int,
    tensor_names: Container[str],
    rope_factors: Sequence[float] | None,
) -> dict[str, Any]:
    """Returns the contents of config.json for a GGUF file.

    Rotary embeddings have the format of transformers 5, ``rope_parameters``. A file may store a
    divisor for each frequency. The divisors of Llama 3 become the rope type ``llama3``. All others
    become the rope type ``factors``, which transformers does not have, with the head_dim / 2
    divisors in a list ``factors``.

    Args:
      metadata: metadata of the file.
      names: the facts about its family.
      vocab_size: number of rows of the embedding.
      tensor_names: GGUF names of the tensors in the file.
      rope_factors: contents of the tensor `ROPE_FACTORS`; None if the file does not have it.

    Raises:
      CheckpointError: a required key is missing.
      UnsupportedModelError: the rope scaling is not supported.
    """
    prefix = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise CheckpointError(f"GGUF metadata lacks {prefix}.{key}")
        return value

    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [names.hf_class],
        "model_type": names.model_type,
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
    return {**config, **names.config(get)}


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
            else {"rope_type": "factors", "factors": list(map(float, factors))}
        )
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        attention_factor = metadata.get(f"{prefix}.scaling.attn_factor", 1.0)
        if attention_factor != 1.0 and factor > 0:
            # GGUF stores a multiple of the Hugging Face default.
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
    """Returns the divisors that a GGUF file stores for the rope type ``llama3``, ``f64[count]``.

    The divisor is 1 for high frequencies and ``factor`` for low ones, with a ramp between.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    low, high = llama3["low_freq_factor"], llama3["high_freq_factor"]
    turns = llama3["original_max_position_embeddings"] / wavelengths
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / llama3["factor"] + kept)


def hf_generation_config(metadata: Metadata) -> dict[str, Any]:
    """Returns the contents of generation_config.json for a GGUF file.

    ``eos_token_id`` lists the end tokens that the file declares (of document, turn and message) and
    its control tokens that are in `END_TOKENS`. Sampling defaults come from the file or, if it has
    none, from `RECOMMENDED`.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL_TOKEN and token in END_TOKENS
    ]
    declared = {name: metadata[key] for key, name in SAMPLING_KEYS.items() if key in metadata}
    family = str(metadata.get("general.basename"))
    config: dict[str, Any] = declared or dict(RECOMMENDED.get(family, {}))
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config

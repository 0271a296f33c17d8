"""Tiny GGUF files, written as llama.cpp converts checkpoints of Hugging Face.

The module shares nothing with `checkpoint.gguf_config`, which reads such files: otherwise its tests
would compare it with itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""``model_type`` of config.json -> architecture of the file, where the two differ."""

KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Key of config.json -> key of the metadata, without the architecture."""


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes a checkpoint without a tokenizer; returns ``path``.

    Args:
      path: the file.
      config: the contents of a config.json that the format can express: see `metadata`.
      tensors: f32 weights by their Hugging Face names.
    """
    return write(path, metadata(config), converted(config, tensors))


def metadata(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the metadata of a config.json. Only linear scaling of rotary embeddings is written.

    ``changes`` replace or add keys, which include the architecture; None removes one.
    """
    prefix = ARCHITECTURES.get(config["model_type"], config["model_type"])
    fields = {f"{prefix}.{name}": config.get(key) for key, name in KEYS.items()}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        fields[f"{prefix}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    fields[f"{prefix}.rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] == "linear":
        fields[f"{prefix}.rope.scaling.type"] = "linear"
        fields[f"{prefix}.rope.scaling.factor"] = rope["factor"]
    fields = {"general.architecture": prefix, **fields, **changes}
    return {key: value for key, value in fields.items() if value is not None}


def converted(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns tensors by GGUF name, changed as the converter does.

    It permutes q and k of the Llama family, and adds 1 to the norms of Gemma.
    """
    result = {}
    is_gemma = config["model_type"].startswith("gemma")
    for name, array in tensors.items():
        if is_gemma and name.endswith("norm.weight"):
            array = array + 1
        if config["model_type"] in ("llama", "mistral"):
            if ".q_proj." in name:
                array = permuted(array, config["num_attention_heads"])
            elif ".k_proj." in name:
                array = permuted(array, config["num_key_value_heads"])
        result[gguf_name(name, is_gemma=is_gemma)] = np.ascontiguousarray(array)
    return result


def gguf_name(name: str, *, is_gemma: bool = False) -> str:
    """Returns the GGUF name of a tensor with a Hugging Face name."""
    stem, kind = name.rsplit(".", 1)
    names = {**NAMES, **GEMMA_NAMES} if is_gemma else NAMES
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{names[match[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Permutes the rows of a q or k projection: those of a rotated pair become adjacent."""
    shape = weights.shape
    heads = weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return heads.swapaxes(1, 2).reshape(shape)


def write(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, Kind] | None = None,
) -> Path:
    """Writes a file; returns ``path``.

    Args:
      path: the file.
      fields: the metadata, with "general.architecture".
      tensors: the arrays by GGUF name.
      kinds: the quantisation of each tensor that is to be quantised.
    """
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    for key, value in fields.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        data = array if kind is None else quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""GGUF files of tiny models, written as the converter of llama.cpp writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

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


def gguf_name(name: str, *, is_gemma: bool = False) -> str:
    """Returns the GGUF name of a tensor with a name of `transformers`."""
    stem, kind = name.rsplit(".", 1)
    names = {**NAMES, **GEMMA_NAMES} if is_gemma else NAMES
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{names[match[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Permutes a q or k projection [heads * head size, ...] as the Llama family needs it."""
    shape = weights.shape
    heads = weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return heads.swapaxes(1, 2).reshape(shape)


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


def metadata(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the fields for a config.json; ``changes`` replaces fields, and None removes one."""
    prefix = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    fields = {f"{prefix}.{key}": value for key, value in fields.items()}
    fields = {"general.architecture": prefix, **fields, **changes}
    return {key: value for key, value in fields.items() if value is not None}


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a GGUF file and returns its path; only tensors named in ``kinds`` are quantised."""
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

"""Tiny checkpoints with random or scripted weights, for tests and experiments."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend

from jaxserve.testing.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_backend

CONFIG: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """Returns the contents of a config.json.

    ``overrides`` replace or add keys; a key with the value None is removed.
    """
    tokenizer = tiny_backend()
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "bos_token_id": tokenizer.token_to_id(SPECIAL_TOKENS["bos_token"]),
        "eos_token_id": tokenizer.token_to_id(SPECIAL_TOKENS["eos_token"]),
        **CONFIG,
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not None}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor of a model with this config.json."""
    from jaxserve.models import loading, registry  # they import jax, which the front must not

    return loading.tensor_shapes(registry.read_spec(config))


def random_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random f32 weights, scaled so that activations are as large as in trained models."""
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        values = rng.standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * values
        else:
            scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            tensors[name] = scale * values
    return tensors


def scripted_tensors(
    config: Mapping[str, Any], successors: Mapping[int, int], *, sharpness: float = 1.0
) -> dict[str, np.ndarray]:
    """Returns f32 weights of a model whose next token depends on the last token only.

    Attention and MLP add nothing, and the embeddings of all tokens are orthogonal.

    Args:
      config: a config.json with ``hidden_size`` at least ``vocab_size`` and an untied head.
      successors: maps tokens to the next token. After a token that is missing here, all tokens are
        equally likely.
      sharpness: the logit of the successor is this times sqrt(hidden_size) and all others are 0,
        so that sampling with temperature 1 follows the script too.
    """
    width, vocab = config["hidden_size"], config["vocab_size"]
    assert width >= vocab, f"hidden_size {width} must be at least vocab_size {vocab}"
    assert not config["tie_word_embeddings"], "the head must not be tied"
    shapes = tensor_shapes(config)
    tensors = {
        name: np.full(shape, float(name.endswith("norm.weight")), np.float32)
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = np.eye(vocab, width, dtype=np.float32)
    for token, successor in successors.items():
        tensors["lm_head.weight"][successor, token] = sharpness
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    num_shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Backend | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a complete checkpoint: configuration, weights, tokenizer, chat template.

    Args:
      folder: the folder, created if it does not exist.
      config: contents of config.json; None: `tiny_config`. Its ``dtype`` is the dtype of the
        written weights.
      tensors: weights; None: `random_tensors`.
      num_shards: number of weight files; more than 1 adds an index.
      generation_config: contents of generation_config.json; None: no such file.
      tokenizer: contents of tokenizer.json; None: `tiny_backend`.
      tokenizer_config: keys to replace in tokenizer_config.json; the value None removes a key.

    Returns:
      ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    tensors = random_tensors(config) if tensors is None else tensors
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(config["dtype"], config["dtype"])
    write_weights(folder, {n: t.astype(dtype) for n, t in tensors.items()}, num_shards=num_shards)
    (tokenizer or tiny_backend()).save(str(folder / "tokenizer.json"))
    names = {**SPECIAL_TOKENS, "chat_template": CHAT_TEMPLATE, **(tokenizer_config or {})}
    files = {
        "config.json": config,
        "tokenizer_config.json": {k: v for k, v in names.items() if v is not None},
    }
    if generation_config is not None:
        files["generation_config.json"] = generation_config
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_weights(folder: Path, tensors: Mapping[str, np.ndarray], *, num_shards: int = 1) -> None:
    """Writes model.safetensors, or ``num_shards`` files and an index if more than 1."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names, weight_map = list(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        own = names[shard::num_shards]
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

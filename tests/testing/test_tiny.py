"""Tiny checkpoints: configs, tensors, scripts and files."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from jaxserve.checkpoint.folder import FolderCheckpoint
from jaxserve.testing.tiny import (
    random_tensors,
    scripted_tensors,
    tensor_shapes,
    tiny_config,
    write_checkpoint,
)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"])
def test_transformers_reads_the_config(family: str, tmp_path: Path) -> None:
    config = tiny_config(f"{family}ForCausalLM", tie_word_embeddings=True, num_hidden_layers=3)
    write_checkpoint(tmp_path, config)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read).__name__ == f"{family}Config"
    assert read.num_hidden_layers == 3
    assert read.rope_parameters["rope_theta"] == 10000.0


def test_none_removes_a_key_of_the_config() -> None:
    assert "head_dim" not in tiny_config(head_dim=None)


def test_tensor_shapes_of_each_architecture() -> None:
    llama = tensor_shapes(tiny_config())
    assert len(llama) == 3 + 2 * 9
    assert llama["model.layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert "lm_head.weight" not in tensor_shapes(tiny_config(tie_word_embeddings=True))
    qwen2 = tensor_shapes(tiny_config("Qwen2ForCausalLM"))
    assert sorted(n for n in qwen2 if n.startswith("model.layers.0") and "bias" in n) == [
        f"model.layers.0.self_attn.{part}_proj.bias" for part in "kqv"
    ]
    qwen3 = tensor_shapes(tiny_config("Qwen3ForCausalLM"))
    assert qwen3["model.layers.0.self_attn.q_norm.weight"] == (16,)


def test_random_tensors_depend_on_the_seed() -> None:
    config = tiny_config()
    first, same, other = (random_tensors(config, seed=seed) for seed in (0, 0, 1))
    for name, array in first.items():
        np.testing.assert_array_equal(array, same[name])
        assert (array != other[name]).any()


def test_scripted_tensors_generate_the_script() -> None:
    config = tiny_config(hidden_size=600)
    tensors = scripted_tensors(config, {5: 7, 7: 7, 9: 0}, sharpness=0.5)
    assert tensors.keys() == tensor_shapes(config).keys()
    for name, array in tensors.items():  # so that a layer adds nothing
        assert ("o_proj" not in name and "down_proj" not in name) or not array.any()
    hidden = tensors["model.embed_tokens.weight"]
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    logits = normed @ tensors["lm_head.weight"].T
    for token, successor in {5: 7, 7: 7, 9: 0}.items():
        expected = np.zeros(512)
        expected[successor] = 0.5 * 600**0.5
        np.testing.assert_allclose(logits[token], expected, rtol=1e-2)
    assert not logits[6].any()


def test_rejects_a_script_without_room_for_every_token() -> None:
    with pytest.raises(AssertionError, match="at least vocab_size"):
        scripted_tensors(tiny_config(), {})
    with pytest.raises(AssertionError, match="must not be tied"):
        scripted_tensors(tiny_config(hidden_size=512, tie_word_embeddings=True), {})


def test_writes_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        num_shards=2,
        generation_config={"eos_token_id": [2, 7]},
        tokenizer_config={"chat_template": None, "add_bos_token": True},
    )
    checkpoint = FolderCheckpoint(tmp_path)
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.generation_config == {
        "eos_token_id": [2, 7, checkpoint.config["eos_token_id"]]
    }
    assert tokenizer.chat_template is None
    assert tokenizer.encode("") == [tokenizer.bos_token_id]
    assert checkpoint.config["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.vocab_size <= checkpoint.config["vocab_size"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]

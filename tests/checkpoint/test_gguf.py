"""GGUF checkpoints: their tensors, and files that are rejected."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from jaxserve.checkpoint.gguf import GGUFCheckpoint, served_name
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config
from jaxserve.testing.tiny_gguf import converted, gguf_name, metadata, permuted, write, write_gguf

open_gguf = functools.partial(GGUFCheckpoint, names_of=gguf_names)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("LlamaForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ],
)
def test_reads_the_same_model_as_from_safetensors(
    tmp_path: Path, architecture: str, options: dict
) -> None:
    config = tiny_config(architecture, **options)
    tensors = random_tensors(config, seed=1)
    checkpoint = open_gguf(write_gguf(tmp_path / "Tiny.F32.gguf", config, tensors))
    assert checkpoint.name == "tiny"
    read = dict(checkpoint.tensors())
    assert list(read) == checkpoint.tensor_names
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    assert checkpoint.num_bytes == sum(array.nbytes for array in read.values())
    has_bias = options.get("attention_bias", False)
    expected = {
        **{key: value for key, value in config.items() if key not in ("dtype", "attention_bias")},
        "rms_norm_eps": pytest.approx(config["rms_norm_eps"]),
        "attention_bias": has_bias or architecture == "Qwen2ForCausalLM",
        "attention_output_bias": has_bias,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert checkpoint.config == expected


def test_quantised_projections_are_permuted_in_whole_rows(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=1, hidden_size=256)
    tensors = random_tensors(config)
    stored = converted(config, tensors)
    kinds = {
        "blk.0.attn_q.weight": Kind.Q4_1,
        "blk.0.attn_k.weight": Kind.Q8_0,
        "blk.0.attn_v.weight": Kind.F16,
        "blk.0.attn_output.weight": Kind.BF16,
        "token_embd.weight": Kind.Q5_1,
    }
    checkpoint = open_gguf(write(tmp_path / "x.gguf", metadata(config), stored, kinds))
    read = dict(checkpoint.tensors())
    assert checkpoint.num_bytes == sum(array.nbytes for array in read.values())
    for gguf_key, kind in kinds.items():
        name = next(name for name in tensors if gguf_name(name) == gguf_key)
        values = quants.dequantize(quants.quantize(stored[gguf_key], kind), kind)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for part, num_heads in heads.items():
            if part + "." in gguf_key:  # undo the permutation, independently: row r moved to row r'
                order = permuted(np.arange(len(values))[:, None], num_heads)[:, 0]
                values = values[np.argsort(order)]
        np.testing.assert_array_equal(read[name].astype(np.float32), values)
    dtypes = {read[f"model.layers.0.self_attn.{x}_proj.weight"].dtype.name for x in "vo"}
    assert dtypes == {"float16", "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"llama.block_count": None}, {}, "lacks llama.block_count"),
        ({"split.count": 3}, {}, "one of 3 parts.*llama-gguf-split --merge"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "tensor blk.0.attn_sinks.weight"),
        ({}, {"something": np.ones(4, np.float32)}, "tensor something"),
    ],
)
def test_rejects_unusable_files(small_gguf, changes: dict, extra: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        small_gguf(changes, extra)


def test_rejects_a_file_without_an_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", metadata(tiny_config()), {"output.weight": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match="no tensor token_embd.weight"):
        open_gguf(path)


GEMMA_SHAPE = {"num_hidden_layers": 7, "sliding_window": 9, "tie_word_embeddings": True}
GEMMA_2 = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "head_dim": 16}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("Gemma2ForCausalLM", query_pre_attn_scalar=16, **GEMMA_2, **GEMMA_SHAPE),
        # Converters before the keys of the caps existed; the values are those of every Gemma 2.
        tiny_config("Gemma2ForCausalLM", query_pre_attn_scalar=16, **GEMMA_SHAPE),
        tiny_config(
            "Gemma3ForCausalLM",
            model_type="gemma3_text",
            query_pre_attn_scalar=16,
            rope_parameters=GEMMA_3_ROPE,
            **GEMMA_SHAPE,
        ),
    ],
    ids=["gemma2", "gemma2-without-caps", "gemma3"],
)
def test_reads_the_same_gemma_as_from_safetensors(tmp_path: Path, config: dict) -> None:
    tensors = random_tensors(config, seed=1)
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", config, tensors))
    # GGUF stores reals in float32.
    found = dataclasses.replace(read_spec(checkpoint.config), norm_eps=config["rms_norm_eps"])
    assert found == read_spec(config)
    read = dict(checkpoint.tensors())
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        # Adding 1 and subtracting it again rounds twice.
        atol = 2e-7 if name.endswith("norm.weight") else 0
        np.testing.assert_allclose(read[name], array, rtol=0, atol=atol, err_msg=name)


def test_names_a_tensor_whose_type_cannot_be_dequantised(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=1)
    tensors = converted(config, random_tensors(config))
    tensors["output_norm.weight"] = np.ones(64, np.int32)
    path = write(tmp_path / "x.gguf", metadata(config), tensors)
    with pytest.raises(CheckpointError, match="output_norm.weight is of type I32"):
        list(open_gguf(path).tensors())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "llama-3.2-1b-instruct"),
        ("qwen2.5-0.5b-instruct-fp16.gguf", "qwen2.5-0.5b-instruct"),
        ("Model-BF16.gguf", "model"),
        ("model.IQ3_XXS.gguf", "model"),
        ("Model-7B.gguf", "model-7b"),
        ("Q4_0.gguf", "q4_0"),
    ],
)
def test_served_name(file: str, name: str) -> None:
    assert served_name(Path("/some/where") / file) == name


def test_reads_the_default_model(smollm2: Path) -> None:
    checkpoint = open_gguf(smollm2)
    assert checkpoint.name == "smollm2-135m-instruct"
    config = checkpoint.config
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in shape] == [30, 576, 9, 3]
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert checkpoint.generation_config == {
        "eos_token_id": [2, 0],
        "temperature": 0.2,
        "top_p": 0.9,
    }
    assert len(checkpoint.tensor_names) == 2 + 30 * 9
    read = dict(zip(range(12), checkpoint.tensors(), strict=False)).values()
    by_name = dict(read)
    assert by_name["model.embed_tokens.weight"].shape == (49152, 576)
    assert by_name["model.layers.0.mlp.down_proj.weight"].shape == (576, 1536)
    q = by_name["model.layers.0.self_attn.q_proj.weight"]
    assert q.shape == (576, 576)
    assert np.isfinite(q).all()
    assert 0.01 < q.std() < 1

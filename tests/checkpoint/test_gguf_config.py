"""The config.json and generation_config.json that the fields of a GGUF file mean."""

import numpy as np
import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.registry import read_spec
from jaxserve.ops.rope import FactorScaling


def test_reads_unusual_settings(small_gguf) -> None:
    changes = {
        "llama.attention.key_length": 32,
        "llama.attention.head_count_kv": None,
        "llama.rope.freq_base": None,
        "llama.rope.dimension_count": 8,
        "llama.attention.sliding_window": 100,
        "llama.vocab_size": 77,  # ignored: the number of rows of the embedding is used
    }
    config = small_gguf(changes).config
    assert config["head_dim"] == 32
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["partial_rotary_factor"] == 0.25
    assert config["sliding_window"] == 100
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["vocab_size"] == 512


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
            },
        ),
        (
            {"type": "yarn", "factor": 0.0, "attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 0.0, "rope_theta": 10000.0},  # refused by `rope_config`
        ),
        (
            {"type": "yarn", "factor": 8.0, "attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(8))),
            },
        ),
    ],
)
def test_reads_rope_scaling(small_gguf, changes: dict, expected: dict) -> None:
    fields = {f"llama.rope.scaling.{key}": value for key, value in changes.items()}
    rope = small_gguf(fields).config["rope_parameters"]
    assert rope == {"rope_theta": 10000.0, **expected}


def test_recognises_the_rope_factors_of_llama3(small_gguf) -> None:
    # The values of the converter for Llama 3.1, with a head size of 16 and a base of 10000.
    factors = []
    for i in range(8):
        wavelength = 2 * np.pi * 10000.0 ** (2 * i / 16)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert len(set(factors)) > 2
    checkpoint = small_gguf({}, {"rope_freqs.weight": np.array(factors, np.float32)})
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensor_names)


def test_keeps_other_rope_factors(small_gguf) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    checkpoint = small_gguf({}, {"rope_freqs.weight": factors})
    rope = checkpoint.config["rope_parameters"]
    assert rope == {"rope_type": "factors", "rope_theta": 10000.0, "factors": factors.tolist()}
    assert read_spec(checkpoint.config).ropes[0].scaling == FactorScaling(tuple(factors.tolist()))


def test_generation_config_has_end_tokens_and_sampling_defaults(small_gguf) -> None:
    changes = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>"],
        # A normal token is not an end token, even if it is named like one.
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    checkpoint = small_gguf(changes)
    assert checkpoint.generation_config == {
        "eos_token_id": [4, 2, 1],
        "temperature": 0.5,
        "top_k": 20,
    }
    assert checkpoint.config["eos_token_id"] == 4


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"general.architecture": "gpt2"}, {}, "'gpt2' is not supported; expected one of gemma2"),
        ({"llama.expert_count": 8}, {}, "with experts"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "rope scaling 'longrope'"),
    ],
)
def test_rejects_unsupported_models(small_gguf, changes: dict, extra: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        small_gguf(changes, extra)

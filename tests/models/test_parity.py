"""Logits of every family and rope scaling, compared with `transformers` (tests/golden)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.layout import Layout
from jaxserve.models.loading import load_params
from jaxserve.models.registry import MODELS, read_spec
from jaxserve.ops.rope import LinearScaling
from jaxserve.testing import tolerance
from jaxserve.testing.tiny import random_tensors

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")
CONFIGS = json.loads(str(GOLDEN["configs"]))
PROMPT = GOLDEN["prompt"].tolist()
UNROLLED = ("llama", "mistral", "qwen2-windows", "qwen3", "gemma2", "gemma3")
CASES = [*((name, "scan") for name in CONFIGS), *((name, "unroll") for name in UNROLLED)]


def assert_close(logits: np.ndarray, name: str, at: int | slice = slice(None)) -> None:
    """Compares with float32 logits of `transformers`, at all positions or at one."""
    tolerance.assert_close(logits, GOLDEN[name][at], num_tokens=len(PROMPT), config=CONFIGS[name])


def test_every_architecture_is_covered():
    covered = {config["architectures"][0] for config in CONFIGS.values()}
    assert covered | {"Gemma3ForConditionalGeneration"} == set(MODELS)


@pytest.mark.parametrize(("name", "loop"), CASES)
def test_logits_equal_those_of_transformers(name, loop, paged_model, in_memory, rng):
    """Runs the whole prompt and, in the same steps, the prompt in three chunks."""
    config = CONFIGS[name]
    model = paged_model(in_memory(random_tensors(config)), config, loop=loop)
    model.start(2, 64, rng)
    cut = sorted(rng.choice(np.arange(1, 40), 2, replace=False).tolist())
    whole, first = model.step([PROMPT, PROMPT[: cut[0]]], num_tokens=80)
    _, second = model.step([[], PROMPT[cut[0] : cut[1]]], num_tokens=80)
    _, third = model.step([[], PROMPT[cut[1] :]], num_tokens=80)
    assert_close(whole, name)
    assert_close(np.concatenate((first, second, third)), name)


@pytest.mark.parametrize("name", ["llama-dynamic", "mistral"])
def test_logits_of_decode_steps_equal_those_of_transformers(name, paged_model, in_memory, rng):
    """Runs two prompts, then one token per step."""
    config = CONFIGS[name]
    model = paged_model(in_memory(random_tensors(config)), config, loop="scan")
    model.start(2, 64, rng)
    start = 30
    model.step([PROMPT[:start], PROMPT[: start + 3]], num_tokens=64)
    for at in range(start, 37):
        a, b = model.step([PROMPT[at : at + 1], PROMPT[at + 3 : at + 4]], decode_only=True)
        assert_close(a[0], name, at)
        assert_close(b[0], name, at + 3)


def test_the_language_model_of_a_gemma_3_with_images_equals_the_text_model(in_memory, caplog):
    config = CONFIGS["gemma3"]
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {k: v for k, v in config.items() if k != "architectures"},
        "vision_config": {"hidden_size": 16},
    }
    spec = read_spec(nested)
    assert dataclasses.replace(spec, architecture="Gemma3ForCausalLM") == read_spec(config)
    tensors = random_tensors(config)
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.post_layernorm.bias"] = np.ones(16, np.float32)
    _, text = load_params(in_memory(tensors), read_spec(config), Layout("float32", "scan"))
    _, same = load_params(in_memory(renamed), spec, Layout("float32", "scan"))
    jax.tree.map(np.testing.assert_array_equal, text, same)
    assert "vision_tower.post_layernorm.bias" in caplog.text


def test_a_gemma_3_with_images_has_the_sizes_that_its_config_leaves_out():
    """The text_config of google/gemma-3-4b-it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    spec = read_spec(config)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (34, 2560, 262208)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.windows[:6] == (1024, 1024, 1024, 1024, 1024, None)
    assert spec.context_length == 131072
    assert [(rope.theta, rope.scaling) for rope in spec.ropes] == [
        (1e4, None),
        (1e6, LinearScaling(8.0)),
    ]
    with pytest.raises(CheckpointError, match="needs an object text_config, got None"):
        read_spec({"architectures": ["Gemma3ForConditionalGeneration"]})

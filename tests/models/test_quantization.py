"""Models with quantised weights, compared with dense models of the same rounded weights."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.models.layout import Layout
from jaxserve.models.loading import array_specs, load_params
from jaxserve.models.registry import MODELS, gguf_names, read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config
from jaxserve.testing.tolerance import of_model

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())


def rounded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rounds matrices [out, in] to 255 values for each output."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            scale = np.abs(tensor).max(1, keepdims=True) / np.float32(127)
            tensor = np.rint(tensor / scale) * scale
        result[name] = tensor
    return result


# The text model of Gemma 3 with images is Gemma 3, in another config.json.
FAMILIES = sorted(set(MODELS) - {"Gemma3ForConditionalGeneration"})
CASES = [*((name, "scan") for name in FAMILIES), ("LlamaForCausalLM", "unroll")]


@pytest.mark.usefixtures("compile_quickly")
@pytest.mark.parametrize(("architecture", "loop"), CASES)
def test_logits_are_those_of_the_rounded_weights(architecture, loop, paged_model, in_memory, rng):
    """In a step of 80 tokens, which multiplies floats, and in steps of 8, with two integers."""
    config = tiny_config(architecture)
    tensors = random_tensors(config, seed=int(rng.integers(2**31)))
    prompt = rng.integers(0, 500, 40).tolist()
    found, want, dense = [], [], []
    for result, weights, source in (
        (found, "int8", tensors),
        (want, "dense", rounded(tensors)),
        (dense, "dense", tensors),
    ):
        model = paged_model(in_memory(source), config, loop=loop, weights=weights)
        model.start(1, 64, rng)
        result.append(model.step([prompt], num_tokens=80)[0])
        model.start(1, 64, rng)
        parts = [model.step([prompt[at : at + 8]], num_tokens=8)[0] for at in range(0, 40, 8)]
        result.append(np.concatenate(parts))
    largest = np.abs(want[0]).max()
    atol = of_model(config, 40, scale=largest)
    np.testing.assert_allclose(found[0], want[0], rtol=0, atol=atol)
    # Inputs are rounded to 15 bits of the largest of a token, at each product.
    np.testing.assert_allclose(found[1], want[1], rtol=0, atol=atol + 2**-9 * largest)
    assert np.abs(dense[0] - want[0]).max() > 2**-8 * largest  # the rounding shows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_loops_have_the_same_arrays_and_only_weights_are_quantised(in_memory, dtype):
    config = tiny_config("Qwen2ForCausalLM")
    spec, weights = read_spec(config), random_tensors(config)
    loaded = {}
    for loop in ("scan", "unroll"):
        layout = Layout(dtype, loop, "int8")
        seen: list[tuple[int, int]] = []
        _, loaded[loop] = load_params(
            in_memory(weights),
            spec,
            layout,
            on_progress=lambda *counts, seen=seen: seen.append(counts),
        )
        declared = jax.tree.map(lambda one: (one.shape, one.dtype), array_specs(spec, layout))
        assert jax.tree.map(lambda a: (a.shape, a.dtype.name), loaded[loop]) == declared
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        assert len(seen) == len(weights)
    scan, unroll = loaded["scan"], loaded["unroll"]
    for layer in (0, 1):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda array, at=layer: array[at], scan["layers"]),
            unroll["layers"][layer],
        )
    found = {path: leaf.dtype.name for path, leaf in jax.tree.leaves_with_path(scan)}
    dtypes = {jax.tree_util.keystr(path): name for path, name in found.items()}
    qkv = "['layers']['attention']['qkv']"
    assert dtypes[f"{qkv}['weight']"] == dtypes["['embed']['weight']"] == "int8"
    assert dtypes[f"{qkv}['scale']"] == dtypes["['embed']['scale']"] == "float32"
    assert dtypes[f"{qkv}['bias']"] == dtypes["['norm']['weight']"] == dtype


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_a_weight_that_is_not_finite_is_refused_by_name(in_memory, loop):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = np.inf
    layout = Layout("float32", loop, "int8")
    with pytest.raises(CheckpointError, match=r"layers\.(1\.)?mlp\.down.* not finite"):
        load_params(in_memory(tensors), read_spec(config), layout)


def test_the_default_model_stays_close_to_its_dense_weights(smollm2, paged_model, rng):
    """From GGUF: after each token of eight texts, the next token is rarely another one.

    `scripts/compare_formats.py` measures the same over longer texts.
    """
    checkpoint = open_checkpoint(str(smollm2), names_of=gguf_names)
    texts = [case["prompt_token_ids"] + case["output_token_ids"] for case in GOLDEN]
    logits = []
    for weights in ("dense", "int8"):
        model = paged_model(checkpoint, checkpoint.config, loop="scan", weights=weights)
        model.start(1, 96, rng)
        model.start(len(texts), 96, rng)
        logits.append(np.concatenate(model.step(texts, num_tokens=512)).astype(np.float64))
    dense, int8 = (each - np.logaddexp.reduce(each, axis=1, keepdims=True) for each in logits)
    divergence = (np.exp(dense) * (dense - int8)).sum(1)
    assert 0 < divergence.mean() < 0.012
    assert (dense.argmax(1) == int8.argmax(1)).mean() > 0.935

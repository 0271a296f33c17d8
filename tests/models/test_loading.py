"""Loading weights: layouts, dtypes, progress, memory, and checkpoints that are rejected."""

from __future__ import annotations

import weakref

import jax
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.loading import load_params
from jaxserve.models.registry import read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config


def load(checkpoint, config, *, dtype="float32", loop="unroll", on_progress=None):
    spec = read_spec(config)
    return load_params(checkpoint, spec, dtype=dtype, loop=loop, on_progress=on_progress)[1]


def test_parameters_are_laid_out_for_the_loop(in_memory):
    config = tiny_config()
    weights = random_tensors(config)
    separate = load(in_memory(weights), config, loop="unroll")
    stacked = load(in_memory(weights), config, loop="scan")
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn"
        want = np.concatenate([weights[f"{prefix}.{p}_proj.weight"].T for p in "qkv"], axis=1)
        np.testing.assert_array_equal(separate["layers"][layer]["attention"]["qkv"]["weight"], want)
        fused = stacked["layers"]["attention"]["qkv"]["weight"]
        np.testing.assert_array_equal(fused[layer], want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_parameters_have_the_requested_dtype_and_progress_adds_up(in_memory, dtype, loop):
    config = tiny_config("Qwen2ForCausalLM")
    seen: list[tuple[int, int]] = []
    params = load(
        in_memory(random_tensors(config)),
        config,
        dtype=dtype,
        loop=loop,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    leaves = jax.tree.leaves(params)
    assert {leaf.dtype.name for leaf in leaves} == {dtype}
    total = sum(leaf.nbytes for leaf in leaves)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) == len(random_tensors(config))


def test_ignores_buffers_of_older_checkpoints(in_memory):
    config = tiny_config()
    weights = random_tensors(config)
    extra = {
        "model.rotary_emb.inv_freq": np.zeros(8),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(8),
        "model.layers.0.self_attn.rotary_emb.cos_cached": np.zeros((1, 1, 4, 16)),
    }
    load(in_memory(weights | extra), config)


def test_skips_tensors_outside_the_model_with_a_warning(in_memory, caplog):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_tensors(config)
    load(in_memory(weights | {"optimizer.step": np.zeros(1), "odd": np.zeros(1)}), config)
    assert "optimizer.step, odd" in caplog.text
    for name in ("model.odd", "lm_head.bias"):
        with pytest.raises(CheckpointError, match=f"has {name}, which"):
            load(in_memory(weights | {name: np.zeros(1)}), config)


def test_accepts_the_tensor_names_of_a_base_model(in_memory):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_tensors(config)
    base = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    wanted = jax.tree.leaves(load(in_memory(weights), config))
    for want, got in zip(wanted, jax.tree.leaves(load(in_memory(base), config)), strict=True):
        np.testing.assert_array_equal(want, got)
    with pytest.raises(CheckpointError, match=r"has model.layers.0.self_attn.q_proj.bias, which"):
        load(in_memory(base | {"layers.0.self_attn.q_proj.bias": np.zeros(64)}), config)


def test_ignores_a_copy_of_a_tied_head_and_requires_an_untied_head(in_memory):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_tensors(config)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    assert "head" not in load(in_memory(weights | head), config)
    with pytest.raises(CheckpointError, match="lacks lm_head.weight"):
        load(in_memory(weights), tiny_config())


def test_rejects_a_bias_that_the_config_lacks(in_memory):
    config = tiny_config()
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64)}
    with pytest.raises(CheckpointError, match="layers.0.self_attn.q_proj.bias"):
        load(in_memory(random_tensors(config) | bias), config)


def test_checks_names_before_reading_weights(in_memory):
    config = tiny_config()
    checkpoint = in_memory({**random_tensors(config), "model.odd": np.zeros(1)})
    checkpoint.tensors = lambda: pytest.fail("weights were read")
    with pytest.raises(CheckpointError, match="has model.odd, which"):
        load(checkpoint, config)


def test_rejects_a_wrong_shape(in_memory):
    config = tiny_config()
    weights = random_tensors(config)
    weights["model.norm.weight"] = np.zeros(65)
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*\(64,\).*\(65,\)"):
        load(in_memory(weights), config)


def test_releases_each_tensor_after_placing_it(in_memory):
    """When a tensor is read, at most the tensor before it is still alive."""
    config = tiny_config()
    weights = random_tensors(config)
    alive: list[weakref.ref] = []

    def tensors():
        for name in list(weights):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = weights[name].copy()
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    checkpoint = in_memory(weights)
    checkpoint.tensors = tensors
    load(checkpoint, config, loop="scan")
    assert len(alive) == len(weights)

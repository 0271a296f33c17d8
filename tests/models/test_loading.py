"""Loading weights: layouts, dtypes, progress, memory, and checkpoints that are rejected."""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.blocks import LayerContext
from jaxserve.models.layout import Layout
from jaxserve.models.loading import array_specs, load_params
from jaxserve.models.registry import MODELS, read_spec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.testing.tiny import random_tensors, tiny_config


def load(checkpoint, config, *, dtype="float32", loop="unroll", on_progress=None):
    layout = Layout(dtype, loop)
    return load_params(checkpoint, read_spec(config), layout, on_progress=on_progress)[1]


def test_parameters_are_laid_out_for_the_loop(in_memory):
    config = tiny_config()
    weights = random_tensors(config)
    separate = load(in_memory(weights), config, loop="unroll")
    stacked = load(in_memory(weights), config, loop="scan")
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn"
        q, k, v = (weights[f"{prefix}.{p}_proj.weight"].T.reshape(64, 2, -1, 16) for p in "qkv")
        want = np.concatenate((q, k, v), axis=2)  # for each key-value head: queries, key, value
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


@pytest.mark.parametrize(
    "architecture",
    sorted(set(MODELS) - {"Gemma3ForConditionalGeneration"}),  # it is Gemma 3
)
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_every_axis_has_a_name_and_the_size_of_its_array(in_memory, architecture, loop):
    config = tiny_config(architecture)
    params = load(in_memory(random_tensors(config)), config, dtype="bfloat16", loop=loop)
    specs = array_specs(read_spec(config), Layout("bfloat16", loop))
    declared = jax.tree.map(lambda one: (one.shape, one.dtype), specs)
    assert jax.tree.map(lambda array: (array.shape, array.dtype.name), params) == declared
    layers = specs["layers"] if loop == "scan" else specs["layers"][0]
    stacked = ("layers",) if loop == "scan" else ()
    attention, mlp = layers["attention"], layers["mlp"]
    names = {
        "qkv": attention["qkv"]["weight"].names,
        "output": attention["output"]["weight"].names,
        "gate_up": mlp["gate_up"]["weight"].names,
        "down": mlp["down"]["weight"].names,
    }
    assert names == {
        "qkv": (*stacked, "embed", "kv_heads", "qkv", "head_dim"),
        "output": (*stacked, "kv_heads", "group", "head_dim", "embed"),
        "gate_up": (*stacked, "embed", "gate_up", "mlp"),
        "down": (*stacked, "mlp", "embed"),
    }
    assert specs["embed"]["weight"].names == ("vocab", "embed")
    assert specs["norm"]["weight"].names == ("embed",)
    if "q_norm" in attention:
        assert attention["q_norm"]["weight"].names == (*stacked, "head_dim")


@pytest.mark.parametrize("axis", ["kv_heads", "mlp"])
def test_a_part_of_an_axis_computes_a_part_of_a_layer(in_memory, rng, axis):
    """The parts of two devices, added, are the whole: attention by heads, the MLP by columns."""
    config = tiny_config("Qwen2ForCausalLM")
    layout = Layout("float32", "unroll")
    spec = read_spec(config)
    graphdef, params = load_params(in_memory(random_tensors(config)), spec, layout)
    specs = array_specs(spec, layout)

    def cut(array, one, half: int):
        if axis not in one.names:
            return array
        where = one.names.index(axis)
        return jnp.split(array, 2, axis=where)[half]

    x = jnp.asarray(rng.standard_normal((5, 64), np.float32))
    parts = [
        nnx.merge(graphdef, jax.tree.map(functools.partial(cut, half=half), params, specs))
        for half in (0, 1)
    ]
    whole, *halves = (
        output(model.layers[0], x, axis) for model in [nnx.merge(graphdef, params), *parts]
    )
    np.testing.assert_allclose(sum(halves), whole, atol=1e-5)


def output(layer, x, axis: str):
    """Returns the output of the MLP, or of attention in which each token sees itself only."""
    if axis == "mlp":
        return layer.mlp(x)
    group = layer.attention.group

    def attend(q, kv, index, meta, **options):
        return jnp.repeat(kv.v[0, 0], group, axis=1)

    def write(kv, index, k, v, meta):
        return KVCache(k[None, None], v[None, None])

    backend = AttentionBackend("own", write=write, attend=attend)
    cos = jnp.ones((len(x), 8))
    none = np.zeros(2, np.int32)
    meta = AttentionMeta(none, none, none[None, :1], none[:1], none)
    step = LayerContext(meta, backend, 0, None, cos, jnp.zeros_like(cos))
    return layer.attention(x, KVCache(x[None, None, None], x[None, None, None]), step)[0]


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

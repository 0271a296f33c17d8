"""Steps of a model: memory, dtypes, names in profiles, and norms of other kinds."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.checkpoint.mapping import Rule
from jaxserve.device import CPU
from jaxserve.models import registry
from jaxserve.models.blocks import Hidden
from jaxserve.models.layout import Layout
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.loading import load_params
from jaxserve.models.registry import read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import parameter
from jaxserve.ops import xla_attention
from jaxserve.ops.attention import KVCache, StepMeta
from jaxserve.testing.tiny import random_tensors, tiny_config

NUM_BLOCKS = 512


@pytest.fixture
def lower(in_memory):
    """``lower(loop, dtype, decode_only=...)``: a lowered step of a tiny model, and its cache."""

    def make(loop: Literal["scan", "unroll"], dtype: str, *, decode_only: bool):
        config = tiny_config(num_hidden_layers=3)
        spec = read_spec(config)
        checkpoint = in_memory(random_tensors(config))
        graphdef, params = load_params(checkpoint, spec, Layout(dtype, loop))
        attention = xla_attention.backend(CPU)

        def step(params, kv, tokens, meta):
            hidden, kv = nnx.merge(graphdef, params)(tokens, kv, meta, attention=attention)
            return nnx.merge(graphdef, params).logits(hidden), kv

        shape = (spec.num_layers, NUM_BLOCKS, 16, spec.num_kv_heads, spec.head_dim)
        kv = KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        size = 4
        zeros = np.zeros(size, np.int32)
        meta = StepMeta(
            positions=zeros,
            slots=zeros[None],
            block_tables=np.zeros((1, size, 8), np.int32),
            seq_lens=zeros,
            query_start=np.zeros(size + 1, np.int32),
            decode_only=decode_only,
        )
        return jax.jit(step, donate_argnums=1).lower(params, kv, zeros, meta), kv

    return make


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_the_cache_is_written_in_place(lower, loop, decode_only):
    """At no time is there a copy of the cache, nor of one layer of it."""
    lowered, kv = lower(loop, "float32", decode_only=decode_only)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= kv.k.nbytes + kv.v.nbytes
    assert memory.temp_size_in_bytes < kv.k.nbytes / 3


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_logits_are_float32_and_the_cache_keeps_its_dtype(lower, loop):
    lowered, _ = lower(loop, "bfloat16", decode_only=True)
    logits, kv = lowered.out_info
    assert logits.dtype == jnp.float32
    assert {kv.k.dtype, kv.v.dtype} == {jnp.dtype("bfloat16")}


def test_profiles_name_the_parts_of_each_layer(lower):
    text = lower("unroll", "float32", decode_only=True)[0].as_text(debug_info=True)
    for name in ("embed", "layer_2/attention", "layer_2/mlp", "logits"):
        assert name in text


class LayerNorm(nnx.Module):
    """As docs/extending.md describes a norm other than `RMSNorm`."""

    def __init__(self, size: int) -> None:
        self.weight = parameter((("embed", size),))
        self.bias = parameter((("embed", size),), name="bias")

    def __call__(self, x: Hidden) -> Hidden:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return normed * self.weight[...] + self.bias[...]


class LayerNormForCausalLM(LlamaForCausalLM):
    """A family whose last norm is a layer norm."""

    RULES = (*LlamaForCausalLM.RULES, Rule("model.norm.bias", "norm.bias"))

    def final_norm(self, spec: ModelSpec) -> LayerNorm:
        """See `CausalLM.final_norm`."""
        return LayerNorm(spec.hidden_size)


def test_the_final_norm_may_be_any_norm(in_memory, monkeypatch, rng):
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    registry.register("LayerNormForCausalLM", f"{__name__}:LayerNormForCausalLM")
    config = tiny_config("LayerNormForCausalLM")
    tensors = random_tensors(config)
    assert tensors["model.norm.bias"].shape == (config["hidden_size"],)
    loaded = load_params(in_memory(tensors), read_spec(config), Layout("float32", "scan"))
    hidden = rng.standard_normal((3, config["hidden_size"]), np.float32)
    x = hidden.astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * tensors["model.norm.weight"] + tensors["model.norm.bias"]
    expected = x @ tensors["lm_head.weight"].T
    np.testing.assert_allclose(nnx.merge(*loaded).logits(jnp.asarray(hidden)), expected, atol=1e-4)

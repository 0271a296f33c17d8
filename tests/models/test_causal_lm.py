"""Steps of a model: memory, dtypes, and names in profiles."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.device import CPU
from jaxserve.models.loading import load_params
from jaxserve.models.registry import read_spec
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
        graphdef, params = load_params(checkpoint, spec, dtype=dtype, loop=loop)
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

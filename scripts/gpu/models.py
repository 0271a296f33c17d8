"""The models that the GPU scripts run, with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.device import Device
from jaxserve.models.loading import build_model
from jaxserve.models.registry import read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionShape, KVCache, select
from jaxserve.runner.step import LanguageModel
from jaxserve.testing.tiny import tiny_config

BLOCK_SIZE = 16

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B,
    "smollm2-135m": SMOLLM2_135M,
    "tiny": tiny_config(max_position_embeddings=2048),
}


def spec_of(name: str, *, num_layers: int | None = None) -> ModelSpec:
    """Returns the spec of a model of `CONFIGS`, with ``num_layers`` layers if given."""
    config = CONFIGS[name]
    if num_layers is not None:
        config = config | {"num_hidden_layers": num_layers}
    return read_spec(config)


def backend_for(name: str, spec: ModelSpec, device: Device, dtype: str) -> AttentionBackend:
    """Returns an attention backend for a model whose cache has the dtype of its weights."""
    shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, dtype, dtype
    )
    return select(name, device, shape)[0]


def abstract_params(spec: ModelSpec, dtype: str) -> tuple[Callable[[Any], LanguageModel], Any]:
    """Returns a function from parameters to the model, and the shapes of the parameters.

    The layers are unrolled.
    """
    graphdef, state = nnx.split(build_model(spec, loop="unroll"))
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(dtype)), nnx.to_pure_dict(state)
    )
    return lambda params: nnx.merge(graphdef, params), shapes


def random_params(shapes: Any, *, seed: int = 0) -> Any:
    """Returns random parameters on the device, scaled so that activations have a realistic size."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [_random(*each) for each in zip(keys, leaves, strict=True)])


def abstract_cache(spec: ModelSpec, *, num_blocks: int, dtype: str) -> KVCache:
    """Returns a cache of shapes, without arrays."""
    shape = (spec.cache_layout.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    array: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return KVCache(array, array)


def _random(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return _draw(key, shape.shape, shape.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)  # the weight of a norm
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)

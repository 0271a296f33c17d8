"""Computes the logits of a checkpoint without an engine: a sequence as one step of its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.device import CPU
from jaxserve.models.layout import Layout
from jaxserve.models.loading import load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.ops import xla_attention
from jaxserve.ops.attention import StepMeta
from jaxserve.runner import kv_cache

BLOCK_SIZE = 16


def logits_of(
    path: Path, tokens: Sequence[int], *, dtype: str = "float32", cache_dtype: str | None = None
) -> Float32[np.ndarray, "tokens vocab"]:
    """Returns the logits f32[T, V] after each token of a sequence.

    The model runs operation by operation, without jit. For many small models, that takes a tenth of
    the time of compiling a program for each.

    Args:
      path: the checkpoint.
      tokens: the sequence, T tokens.
      dtype: dtype of weights and activations.
      cache_dtype: dtype of the KV cache; None: ``dtype``. Every token reads its context, and its
        own key and value, from the cache.

    Raises:
      CheckpointError, UnsupportedModelError: the checkpoint cannot be opened or loaded.
    """
    checkpoint = open_checkpoint(str(path), names_of=gguf_names)
    spec = read_spec(checkpoint.config)
    graphdef, params = load_params(checkpoint, spec, Layout(dtype, "unroll"))
    count = len(tokens)
    width = -(-count // BLOCK_SIZE)
    layout = spec.cache_layout
    tables = 1 + jnp.arange(len(layout.windows) * width).reshape(-1, 1, width)
    cache = kv_cache.abstract(
        num_layers=layout.num_layers,
        num_blocks=tables.size + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=cache_dtype or dtype,
    )
    kv = kv_cache.allocate(cache)
    meta = StepMeta(
        positions=jnp.arange(count),
        slots=tables[:, :, 0] * BLOCK_SIZE + jnp.arange(count),
        block_tables=tables,
        seq_lens=jnp.array([count]),
        query_start=jnp.array([0, count]),
        decode_only=False,
    )
    attention = xla_attention.backend(CPU)
    with jax.disable_jit():
        model = nnx.merge(graphdef, params)
        hidden, _ = model(jnp.asarray(tokens, jnp.int32), kv, meta, attention=attention)
        return np.asarray(model.logits(hidden))

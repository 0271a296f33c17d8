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


class OneStepModel:
    """The model of a checkpoint, which runs each sequence as one step, operation by operation.

    It compiles no program. For many small models, that takes a tenth of the time of compiling one
    for each.

    Args:
      path: the checkpoint.
      dtype: dtype of weights and activations.

    Raises:
      CheckpointError, UnsupportedModelError: the checkpoint cannot be opened or loaded.
    """

    def __init__(self, path: Path, *, dtype: str = "float32") -> None:
        checkpoint = open_checkpoint(str(path), names_of=gguf_names)
        self._spec = read_spec(checkpoint.config)
        self._dtype = dtype
        graphdef, params = load_params(checkpoint, self._spec, Layout(dtype, "unroll"))
        self._model = nnx.merge(graphdef, params)

    def logits(
        self, tokens: Sequence[int], *, cache_dtype: str | None = None
    ) -> Float32[np.ndarray, "tokens vocab"]:
        """Returns the logits f32[T, V] after each token of a sequence of T tokens.

        Every token reads its context, and its own key and value, from a KV cache of this dtype;
        None: the dtype of the model.
        """
        count = len(tokens)
        width = -(-count // BLOCK_SIZE)
        layout = self._spec.cache_layout
        tables = 1 + jnp.arange(len(layout.windows) * width).reshape(-1, 1, width)
        cache = kv_cache.abstract(
            num_layers=layout.num_layers,
            num_blocks=tables.size + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            dtype=cache_dtype or self._dtype,
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
        with jax.disable_jit():
            hidden, _ = self._model(
                jnp.asarray(tokens, jnp.int32), kv, meta, attention=xla_attention.backend(CPU)
            )
            return np.asarray(self._model.logits(hidden))


def logits_of(
    path: Path, tokens: Sequence[int], *, dtype: str = "float32"
) -> Float32[np.ndarray, "tokens vocab"]:
    """Returns the logits of a new `OneStepModel` for one sequence."""
    return OneStepModel(path, dtype=dtype).logits(tokens)

"""Runs a model as an engine does: packed steps over a paged cache with shuffled blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

BLOCK_SIZE = 16


@dataclass
class InMemory:
    """A checkpoint of the given tensors."""

    weights: Mapping[str, np.ndarray]

    @property
    def tensor_names(self) -> list[str]:
        return list(self.weights)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.weights.items()


class PagedModel:
    """A model and the paged cache of its requests, each of which owns shuffled blocks.

    In groups of layers with a window, a request gives back the blocks that it does not see any
    more: their entries in its block table become 0, the block that is NaN. `step` takes the new
    tokens of each request and returns the logits after each of them.
    """

    def __init__(self, checkpoint: Any, config: Mapping[str, Any], *, loop: str, **options) -> None:
        self.spec = read_spec(config)
        graphdef, self.params = load_params(
            checkpoint, self.spec, dtype="float32", loop=loop, **options
        )
        attention = xla_attention.backend(CPU)

        @functools.partial(jax.jit, donate_argnums=1)
        def step(params, kv, tokens, meta):
            model = nnx.merge(graphdef, params)
            hidden, kv = model(tokens, kv, meta, attention=attention)
            return model.logits(hidden), kv

        self._step = step

    def start(self, num_requests: int, max_len: int, rng: np.random.Generator) -> None:
        width = -(-max_len // BLOCK_SIZE)
        spec, layout = self.spec, self.spec.cache_layout
        num_groups = len(layout.windows)
        num_blocks = num_groups * num_requests * width + 1
        shape = (layout.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.kv = KVCache(jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan))
        blocks = rng.permutation(np.arange(1, num_blocks))
        self.tables = blocks.reshape(num_groups, num_requests, width)
        self.lens = np.zeros(num_requests, int)
        self.end = num_blocks * BLOCK_SIZE

    def step(
        self, tokens: Sequence[Sequence[int]], *, num_tokens: int = 0, decode_only: bool = False
    ) -> list[np.ndarray]:
        """Pads a step to ``num_tokens``, or to 2, since programs of one token are slow on a CPU."""
        counts = [len(part) for part in tokens]
        num_tokens = max(num_tokens, sum(counts), 2)
        pad_rows = num_tokens - len(counts) if decode_only else 1
        positions = [n + i for n, c in zip(self.lens, counts, strict=True) for i in range(c)]
        rows = [row for row, c in enumerate(counts) for _ in range(c)]
        self._give_back()
        within = np.array(positions, int) % BLOCK_SIZE
        blocks = np.array(positions, int) // BLOCK_SIZE
        slots = self.tables[:, rows, blocks] * BLOCK_SIZE + within
        self.lens += counts

        def pad(values, size: int, fill: int) -> np.ndarray:
            return np.array([*values, *[fill] * (size - len(values))], np.int32)

        num_rows = len(counts) + pad_rows
        meta = StepMeta(
            positions=pad(positions, num_tokens, 0),
            slots=np.stack([pad(each, num_tokens, self.end) for each in slots]),
            block_tables=np.pad(self.tables, ((0, 0), (0, pad_rows), (0, 0))).astype(np.int32),
            seq_lens=pad(self.lens, num_rows, 0),
            query_start=pad(np.cumsum([0, *counts]), num_rows + 1, sum(counts)),
            decode_only=decode_only,
        )
        flat = pad([token for part in tokens for token in part], num_tokens, 0)
        logits, self.kv = self._step(self.params, self.kv, flat, meta)
        ends = np.cumsum(counts)
        return np.split(np.asarray(logits)[: sum(counts)], ends[:-1])

    def _give_back(self) -> None:
        """Clears the entries of the blocks that no token from now on sees."""
        for window, tables in zip(self.spec.cache_layout.windows, self.tables, strict=True):
            for table, length in zip(tables, self.lens, strict=True):
                if window is not None:
                    table[: max(0, length - window + 1) // BLOCK_SIZE] = 0


@pytest.fixture(scope="session")
def in_memory() -> Callable[[Mapping[str, np.ndarray]], InMemory]:
    return InMemory


@pytest.fixture(scope="session")
def paged_model() -> type[PagedModel]:
    return PagedModel

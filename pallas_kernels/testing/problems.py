"""Attention problems with random inputs, and their solutions in float64 by loops over numpy arrays.

They check the kernels, interpreted or on a device. All entries that the kernels must not read are
poison: NaN in dtypes that have it and in scales, and IDs far out of range in the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Num

NUM_LAYERS = 2
LAYER = 1
SPARE_BLOCKS = 3
BAD_BLOCK = 10**6

TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 1e-5}
"""The largest relative error of an output row, by dtype. Both products round their inputs, and the
result is rounded too.
"""

NumpyCache = Num[np.ndarray, "layers blocks block_size kv_heads head_dim"]
NumpyScales = Float32[np.ndarray, "layers blocks block_size kv_heads"]


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a problem.

    For each request, ``contexts`` has the number of its tokens in the cache, and ``chunks`` the
    number of its queries, which are its last tokens. The block tables have room for the longest
    context and ``num_spare_columns`` more blocks. ``num_padding`` tokens follow the queries.
    """

    contexts: Sequence[int]
    chunks: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    num_padding: int = 0
    num_spare_columns: int = 1


@dataclass(frozen=True)
class Problem:
    """The arguments of a call, and its correct result."""

    shape: Shape
    q: Float[np.ndarray, "tokens heads head_dim"]
    k_cache: NumpyCache
    v_cache: NumpyCache
    block_tables: Int32[np.ndarray, "rows width"]
    seq_lens: Int32[np.ndarray, " rows"]
    query_start: Int32[np.ndarray, " rows+1"]
    k_scale: NumpyScales | None
    v_scale: NumpyScales | None
    expected: Float64[np.ndarray, "tokens heads head_dim"]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {
            "scale": self.shape.head_dim**-0.5,
            "window": self.shape.window,
            "soft_cap": self.shape.soft_cap,
        } | {name: s for name, s in scales.items() if s is not None}

    def error(self, out: object) -> float:
        """Returns the largest relative error of an output row, padding included; may be NaN."""
        result = np.asarray(out).astype(np.float64)
        assert result.shape == self.expected.shape
        error = np.linalg.norm(result - self.expected, axis=-1)
        size = np.linalg.norm(self.expected, axis=-1)
        return float(np.max(error / np.where(size == 0.0, 1.0, size)))

    def check(self, out: object) -> None:
        """Asserts that every row of the output is correct, padding included."""
        error = self.error(out)
        assert error < TOLERANCE[self.shape.dtype], f"relative error {error:.2e}"


def make_problem(rng: np.random.Generator, shape: Shape) -> Problem:
    """Returns a random problem of a shape."""
    cache = _Cache(rng, shape)
    num_tokens = sum(shape.chunks) + shape.num_padding
    q = rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim))
    q = q.astype(jnp.dtype(shape.dtype))
    q[sum(shape.chunks) :] = np.nan
    expected = np.zeros(q.shape, np.float64)
    token = 0
    for request, (context, chunk) in enumerate(zip(shape.contexts, shape.chunks, strict=True)):
        first = context - chunk if shape.window is None else context - chunk - shape.window + 1
        keys, values = cache.fill(request, first_visible=max(0, first) if shape.window else 0)
        for position in range(context - chunk, context):
            if position >= 0:
                expected[token] = _attend(q[token], keys, values, position, shape)
            token += 1
    return Problem(
        shape=shape,
        q=q,
        k_cache=cache.k,
        v_cache=cache.v,
        block_tables=cache.tables,
        seq_lens=np.array(shape.contexts, np.int32),
        query_start=np.cumsum([0, *shape.chunks], dtype=np.int32),
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        expected=expected,
    )


class _Cache:
    """A paged cache full of poison, to which requests are added one by one."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        dtype = jnp.dtype(shape.cache_dtype or shape.dtype)
        lengths = [-(-context // shape.block_size) for context in shape.contexts]
        num_blocks = sum(lengths) + SPARE_BLOCKS
        dims = (shape.block_size, shape.num_kv_heads, shape.head_dim)
        poison = 127 if dtype == np.int8 else np.nan
        self.rng, self.shape = rng, shape
        self.k = np.full((NUM_LAYERS, num_blocks, *dims), poison, dtype)
        self.v = self.k.copy()
        self.k_scale = self.v_scale = None
        if dtype == np.int8:
            self.k_scale, self.v_scale = (
                np.full(self.k.shape[:-1], np.nan, np.float32) for _ in range(2)
            )
        self.tables = np.full(
            (len(lengths), max(lengths) + shape.num_spare_columns), BAD_BLOCK, np.int32
        )
        blocks = 1 + rng.permutation(num_blocks - 1)  # block 0, where masked reads point, is poison
        for request, length in enumerate(lengths):
            self.tables[request, :length], blocks = blocks[:length], blocks[length:]

    def fill(
        self, request: int, *, first_visible: int
    ) -> tuple[
        Float64[np.ndarray, "context kv_heads head_dim"],
        Float64[np.ndarray, "context kv_heads head_dim"],
    ]:
        """Draws the keys and values of a request and writes them to its blocks.

        Args:
          request: index of the request.
          first_visible: positions before this one are drawn but not written.

        Returns:
          The keys and the values, float64 [context, num_kv_heads, head_dim].
        """
        size, context = self.shape.block_size, self.shape.contexts[request]
        positions = np.arange(first_visible, context)
        where = (LAYER, self.tables[request, positions // size], positions % size)
        filled = []
        for cache, scales in ((self.k, self.k_scale), (self.v, self.v_scale)):
            rows = self.rng.standard_normal((context, *cache.shape[3:]))
            scale = np.ones(rows.shape[:-1], np.float32)
            if scales is not None:
                # Some values are beyond the largest entry, and are clipped.
                scale = self.rng.uniform(0.01, 0.05, scale.shape).astype(np.float32)
                rows = np.clip(np.round(rows / scale[..., None]), -127, 127)
                scales[where] = scale[first_visible:]
            rows = rows.astype(cache.dtype)
            cache[where] = rows[first_visible:]
            filled.append(rows.astype(np.float64) * scale[..., None].astype(np.float64))
        return filled[0], filled[1]


def _attend(
    q: Float[np.ndarray, "heads head_dim"],
    keys: Float64[np.ndarray, "context kv_heads head_dim"],
    values: Float64[np.ndarray, "context kv_heads head_dim"],
    position: int,
    shape: Shape,
) -> Float64[np.ndarray, "heads head_dim"]:
    """Returns the attention output of all query heads at one position."""
    out = np.zeros(q.shape, np.float64)
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    for head in range(shape.num_heads):
        kv_head = head * shape.num_kv_heads // shape.num_heads
        scores = keys[first : position + 1, kv_head] @ q[head].astype(np.float64)
        scores *= shape.head_dim**-0.5
        if shape.soft_cap is not None:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[first : position + 1, kv_head] / weights.sum()
    return out

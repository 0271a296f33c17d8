"""Attention with one very large score, next to which all other weights are small."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quantization import quantize
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.testing.problems import TOLERANCE

NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, CONTEXT = 2, 2, 64, 16, 256
SCALE = HEAD_DIM**-0.5


def sink_problem(rng: np.random.Generator, largest_value: float, cache_dtype: str):
    """Returns the query of one request, and its cache, scales and block table.

    The first key has the score 10. Its value is nearly zero, as in trained models, so the result is
    the sum of the other values with weights of about 1e-4.
    """
    query = rng.standard_normal((NUM_KV_HEADS, GROUP, HEAD_DIM))
    query[:, 1] = query[:, 0]
    shape = (1, 1 + CONTEXT // BLOCK_SIZE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    keys = rng.standard_normal(shape)
    values = rng.uniform(0.5, 1, shape) * largest_value
    direction = query[:, 0] / np.sum(query[:, 0] ** 2, axis=-1, keepdims=True)
    keys[0, 1, 0] = 10 / SCALE * direction
    values[0, 1, 0] *= 1e-6
    k, k_scale = quantize(jnp.asarray(keys, jnp.float32), cache_dtype)
    v, v_scale = quantize(jnp.asarray(values, jnp.float32), cache_dtype)
    table = jnp.arange(1, shape[1], dtype=jnp.int32)[None]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return query.reshape(1, -1, HEAD_DIM), (k, v, table), scales


@pytest.mark.parametrize("kernel", ["decode", "ragged"])
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("largest_value", [10.0, 0.1])
def test_small_weights_are_not_lost_in_float16(kernel, cache_dtype, largest_value, rng):
    query, cache, scales = sink_problem(rng, largest_value, cache_dtype)
    query = jnp.asarray(query, jnp.float16)
    seq_lens = jnp.array([CONTEXT], jnp.int32)
    options = {"scale": SCALE, **scales}
    if kernel == "decode":
        found = paged_decode(query, *cache, seq_lens, 0, **options, interpret=True)
    else:
        start = jnp.array([0, 1], jnp.int32)
        found = ragged_attention(query, *cache, seq_lens, start, 0, **options, interpret=True)
    wide = query.astype(jnp.float32)
    wanted = np.asarray(reference.paged_decode(wide, *cache, seq_lens, 0, **options), np.float64)
    assert 1e-4 * largest_value < np.abs(wanted).max() < 0.1 * largest_value
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < TOLERANCE["float16"]

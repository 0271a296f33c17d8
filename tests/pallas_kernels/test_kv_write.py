"""The kernel that writes the KV cache: slots, quantization, and arguments that are rejected."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.kv_write import kv_write

NUM_LAYERS, NUM_BLOCKS, LAYER = 2, 5, 1
QUANTIZED_MAX = {"float8_e4m3fn": 448.0, "int8": 127.0}


def exact(array: object) -> np.ndarray:
    """Returns an array as float32, for comparisons in which NaN equals NaN."""
    return np.asarray(array).astype(np.float32)


def draw(rng, *, dtype, cache_dtype, num_kv_heads=3, head_dim=64, block_size=16):
    """Returns caches of values and NaN, new rows, and slots: live, past the end, and negative."""
    caches = 30 * rng.standard_normal(
        (2, NUM_LAYERS, NUM_BLOCKS, block_size, num_kv_heads, head_dim)
    )
    if cache_dtype != "int8":
        caches[rng.random(caches.shape) < 0.1] = np.nan
    k_cache, v_cache = caches.astype(jnp.dtype(cache_dtype))
    num_slots = NUM_BLOCKS * block_size
    first, last = 0, num_slots - 1
    middle = 1 + rng.permutation(num_slots - 2)[:4]
    slots = np.array([*middle, num_slots, first, -1, last, num_slots], np.int32)
    rows = (len(slots), num_kv_heads, head_dim)
    k, v = (rng.standard_normal(rows).astype(jnp.dtype(dtype)) for _ in range(2))
    k[slots == num_slots] = np.nan
    return k_cache, v_cache, k, v, slots


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "sizes"),
    [
        ("bfloat16", "bfloat16", {}),
        ("float16", "float16", {"num_kv_heads": 1, "head_dim": 80, "block_size": 64}),
        ("float32", "bfloat16", {"num_kv_heads": 8, "head_dim": 128, "block_size": 32}),
        ("bfloat16", "float32", {"num_kv_heads": 5, "head_dim": 96}),
    ],
)
def test_writes_rows_into_their_slots_and_changes_nothing_else(dtype, cache_dtype, sizes, rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype=dtype, cache_dtype=cache_dtype, **sizes)
    k_out, v_out = kv_write(k_cache, v_cache, k, v, slots, LAYER, interpret=True)
    block_size = k_cache.shape[2]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < NUM_BLOCKS * block_size:
                cache[LAYER, slot // block_size, slot % block_size] = row.astype(cache.dtype)
    np.testing.assert_array_equal(exact(k_out), exact(k_cache))
    np.testing.assert_array_equal(exact(v_out), exact(v_cache))


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_quantizes_rows(cache_dtype, rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype="float32", cache_dtype=cache_dtype)
    limit = QUANTIZED_MAX[cache_dtype]
    k_scale, v_scale = rng.uniform(0.5, 2.0, (2, NUM_LAYERS, 3)).astype(np.float32) / limit
    k[0, 0, :2] = 1e6, -1e6  # beyond the largest entry
    out = kv_write(
        k_cache, v_cache, k, v, slots, LAYER, k_scale=k_scale, v_scale=v_scale, interpret=True
    )
    live = np.flatnonzero((slots >= 0) & (slots < NUM_BLOCKS * 16))
    where = (LAYER, slots[live] // 16, slots[live] % 16)
    parts = ((k_cache, k, k_scale, out[0]), (v_cache, v, v_scale, out[1]))
    for cache, rows, scale, result in parts:
        written = np.asarray(result)[where]
        want = np.clip(rows[live].astype(np.float64) / scale[LAYER][:, None], -limit, limit)
        # Half a unit for an integer; a sixteenth of a float with 3 bits after the point.
        unit = 0.5 if cache_dtype == "int8" else np.maximum(np.abs(want) / 16, 2.0**-10)
        assert np.all(np.abs(written.astype(np.float64) - want) <= unit * 1.0001)
        cache[where] = written
        np.testing.assert_array_equal(exact(result), exact(cache))


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_reference_equals_the_kernel(cache_dtype, rng):
    *data, slots = draw(rng, dtype="bfloat16", cache_dtype=cache_dtype)
    scales = {}
    if cache_dtype == "int8":
        scale = rng.uniform(0.01, 0.03, (NUM_LAYERS, 3)).astype(np.float32)
        scales = {"k_scale": scale, "v_scale": scale * 2}
    out = kv_write(*data, slots, LAYER, **scales, interpret=True)
    scales = {name: jnp.asarray(scale) for name, scale in scales.items()}
    expected = reference.kv_write(*map(jnp.asarray, (*data, slots)), LAYER, **scales)
    for result, want in zip(out, expected, strict=True):
        np.testing.assert_array_equal(exact(result), exact(want))


def test_a_donated_cache_is_written_in_place(rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype="bfloat16", cache_dtype="bfloat16")
    write = jax.jit(functools.partial(kv_write, interpret=False), donate_argnums=(0, 1))
    lowered = write.trace(k_cache, v_cache, k, v, slots, LAYER).jaxpr
    assert "input_output_aliases=((4, 0), (5, 1))" in str(lowered)


@pytest.mark.parametrize(
    ("cache_dtype", "scales", "message"),
    [
        ("int8", {}, r"k_scale must have shape \(2, 3\) for an int8 cache, got None"),
        ("int8", {"k_scale": np.ones((2, 1))}, r"k_scale must have shape \(2, 3\), got \(2, 1\)"),
        ("bfloat16", {"v_scale": np.ones((2, 3))}, "v_scale must be None for a cache of bfloat16"),
    ],
)
def test_rejects_scales_that_do_not_fit(cache_dtype, scales, message, rng):
    data = draw(rng, dtype="bfloat16", cache_dtype=cache_dtype)
    with pytest.raises(ValueError, match=message):
        kv_write(*data, LAYER, **scales, interpret=True)


def test_rejects_an_8_bit_cache_between_2_and_4_gib():
    cache = jax.ShapeDtypeStruct((3, 2**15, 64, 4, 128), jnp.float8_e4m3fn)
    row, slots = (
        jax.ShapeDtypeStruct((1, 4, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), "int32"),
    )
    with pytest.raises(ValueError, match="smaller than 2 GiB or larger than 4 GiB"):
        jax.eval_shape(kv_write, cache, cache, row, row, slots, 0)

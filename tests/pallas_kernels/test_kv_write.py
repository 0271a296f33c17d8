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
    k_out, v_out, *scales = kv_write(k_cache, v_cache, k, v, slots, LAYER, interpret=True)
    assert scales == [None, None]
    block_size = k_cache.shape[2]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < NUM_BLOCKS * block_size:
                cache[LAYER, slot // block_size, slot % block_size] = row.astype(cache.dtype)
    np.testing.assert_array_equal(exact(k_out), exact(k_cache))
    np.testing.assert_array_equal(exact(v_out), exact(v_cache))


def live(slots: np.ndarray) -> tuple[np.ndarray, tuple]:
    """Returns the tokens that are written, and the index of their slots in a cache."""
    tokens = np.flatnonzero((slots >= 0) & (slots < NUM_BLOCKS * 16))
    return tokens, (LAYER, slots[tokens] // 16, slots[tokens] % 16)


def test_a_float8_cache_holds_the_nearest_values_and_never_nan(rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype="float32", cache_dtype="float8_e4m3fn")
    k[0, 0, :4] = 1e6, -1e6, np.inf, 450.0  # beyond the largest entry
    out = kv_write(k_cache, v_cache, k, v, slots, LAYER, interpret=True)
    assert out[2:] == (None, None)
    tokens, where = live(slots)
    for cache, rows, result in ((k_cache, k, out[0]), (v_cache, v, out[1])):
        want = np.clip(rows[tokens].astype(np.float64), -448, 448)
        written = np.asarray(result)[where]
        unit = np.maximum(np.abs(want) / 16, 2.0**-10)  # 3 bits after the point
        assert np.all(np.abs(written.astype(np.float64) - want) <= unit)
        cache[where] = written
        np.testing.assert_array_equal(exact(result), exact(cache))


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 5, "head_dim": 96}])
def test_an_int8_cache_has_a_scale_for_each_slot_and_head(sizes, rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype="float32", cache_dtype="int8", **sizes)
    k_scale, v_scale = rng.standard_normal((2, *k_cache.shape[:-1])).astype(np.float32)
    k[0, 0, 3] = 1e6  # one large value does not change the precision of other heads and tokens
    k[1, 1] = 0
    v[1, 1] = 1e-40  # its scale is not a normal number
    out = kv_write(
        k_cache, v_cache, k, v, slots, LAYER, k_scale=k_scale, v_scale=v_scale, interpret=True
    )
    tokens, where = live(slots)
    for cache, scales, rows, entries, written in (
        (k_cache, k_scale, k, out[0], out[2]),
        (v_cache, v_scale, v, out[1], out[3]),
    ):
        want = rows[tokens].astype(np.float64)
        found = np.asarray(entries)[where], np.asarray(written)[where].astype(np.float64)
        np.testing.assert_allclose(found[1], np.abs(want).max(-1) / 127, rtol=1e-6, atol=1e-38)
        error = np.abs(found[0] * found[1][..., None] - want)
        assert np.all(error <= 0.5001 * found[1][..., None] + 1e-38)
        cache[where], scales[where] = found
        np.testing.assert_array_equal(entries, cache)
        np.testing.assert_array_equal(written, scales)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_reference_equals_the_kernel(cache_dtype, rng):
    *data, slots = draw(rng, dtype="bfloat16", cache_dtype=cache_dtype)
    scales = {}
    if cache_dtype == "int8":
        k_scale, v_scale = rng.standard_normal((2, *data[0].shape[:-1])).astype(np.float32)
        scales = {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
    out = kv_write(*data, slots, LAYER, **scales, interpret=True)
    expected = reference.kv_write(*map(jnp.asarray, (*data, slots)), LAYER, **scales)
    for result, want in zip(out, expected, strict=True):
        assert (result is None) == (want is None)
        if want is not None:
            np.testing.assert_array_equal(exact(result), exact(want))


def test_a_donated_cache_is_written_in_place(rng):
    k_cache, v_cache, k, v, slots = draw(rng, dtype="bfloat16", cache_dtype="bfloat16")
    write = jax.jit(functools.partial(kv_write, interpret=False), donate_argnums=(0, 1))
    lowered = write.trace(k_cache, v_cache, k, v, slots, LAYER).jaxpr
    assert "input_output_aliases=((4, 0), (5, 1))" in str(lowered)


def test_donated_scales_are_written_in_place(rng):
    *data, slots = draw(rng, dtype="bfloat16", cache_dtype="int8")
    scale = np.zeros(data[0].shape[:-1], np.float32)
    lowered = kv_write.trace(*data, slots, LAYER, k_scale=scale, v_scale=scale).jaxpr
    assert "input_output_aliases=((4, 0), (5, 1), (6, 2), (7, 3))" in str(lowered)


@pytest.mark.parametrize(
    ("cache_dtype", "scales", "message"),
    [
        ("int8", {}, r"k_scale must have shape \(2, 5, 16, 3\) for an int8 cache, got None"),
        ("int8", {"k_scale": 1}, r"k_scale must have shape .*, got \(2, 5, 16, 1\)"),
        ("bfloat16", {"v_scale": 3}, "v_scale must be None for a cache of bfloat16"),
        ("float8_e4m3fn", {"k_scale": 3}, "k_scale must be None for a cache of float8_e4m3fn"),
    ],
)
def test_rejects_scales_that_do_not_fit(cache_dtype, scales, message, rng):
    data = draw(rng, dtype="bfloat16", cache_dtype=cache_dtype)
    scales = {name: np.ones((2, 5, 16, heads), np.float32) for name, heads in scales.items()}
    with pytest.raises(ValueError, match=message):
        kv_write(*data, LAYER, **scales, interpret=True)


def test_rejects_an_8_bit_cache_between_2_and_4_gib():
    cache = jax.ShapeDtypeStruct((3, 2**15, 64, 4, 128), jnp.float8_e4m3fn)
    row, slots = (
        jax.ShapeDtypeStruct((1, 4, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), "int32"),
    )
    with pytest.raises(ValueError, match="at most 2 GiB or more than 4 GiB, got 3.00 GiB"):
        jax.eval_shape(kv_write, cache, cache, row, row, slots, 0)

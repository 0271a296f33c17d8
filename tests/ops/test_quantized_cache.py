"""Caches of 8 bits: every backend, compared with float64 numpy, with NaN in unused slots."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import CPU
from jaxserve.ops.attention import BACKENDS, AttentionMeta, KVCache, load
from pallas_kernels.testing.problems import LAYER, Problem, Shape, make_problem

CONTEXTS = (50, 1, 17, 16, 35, 140, 64, 0, 15)
CHUNKS = (1, 1, 1, 16, 35, 70, 24, 0, 0)
DTYPES = ("int8", "float8_e4m3fn")

CASES = {
    "decode, group 3": {"chunks": (1,) * 7, "num_heads": 9, "num_kv_heads": 3},
    "decode, window": {"chunks": (1,) * 7, "window": 20, "soft_cap": 2.0, "head_dim": 32},
    "decode, many heads": {"chunks": (1,) * 7, "num_heads": 16, "num_kv_heads": 8},
    "mixed, group 3": {"num_heads": 9, "num_kv_heads": 3, "num_padding": 6},
    "mixed, window": {"window": 20, "soft_cap": 3.0, "block_size": 32, "num_padding": 1},
    "mixed, one key head": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80, "block_size": 4},
}
FOR_KERNELS = ("decode, group 3", "decode, window", "mixed, window")
RUNS = [(b, n) for b in BACKENDS for n in CASES if b != "pallas_triton" or n in FOR_KERNELS]


def draw(rng: np.random.Generator, name: str, cache_dtype: str) -> tuple[Problem, AttentionMeta]:
    """Returns a random problem, and how it maps tokens to requests; nothing is written."""
    options = {"chunks": CHUNKS} | CASES[name]
    is_decode = name.startswith("decode")
    contexts = [c for c in CONTEXTS if c] if is_decode else CONTEXTS
    contexts = contexts[: len(options["chunks"])]
    problem = make_problem(
        rng, Shape(contexts, dtype="float32", cache_dtype=cache_dtype, **options)
    )
    unused = jnp.zeros(len(problem.q), jnp.int32)
    meta = AttentionMeta(
        unused,
        unused,
        jnp.asarray(problem.block_tables),
        jnp.asarray(problem.seq_lens),
        jnp.asarray(problem.query_start),
        decode_only=is_decode,
    )
    return problem, meta


def cache_of(*arrays: np.ndarray | None) -> KVCache:
    """Returns a cache of keys, values and their scales. Float8 numbers become their bits."""

    def held(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.view(np.uint8) if x.dtype == "float8_e4m3fn" else x)

    return KVCache(*(None if x is None else held(x) for x in arrays))


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("backend", "name"), RUNS)
def test_attend_equals_float64_reference(backend, name, cache_dtype, rng):
    problem, meta = draw(rng, name, cache_dtype)
    options = {k: v for k, v in problem.options.items() if not k.endswith("_scale")}
    attend = functools.partial(load(backend, CPU).attend, **options)
    kv = cache_of(problem.k_cache, problem.v_cache, problem.k_scale, problem.v_scale)
    out = np.array(jax.jit(attend)(problem.q, kv, LAYER, meta))
    out[sum(problem.shape.chunks) :] = 0  # padding is arbitrary; its queries are NaN here
    problem.check(out)


def write_problem(rng: np.random.Generator, cache_dtype: str):
    """Returns a cache with NaN, new keys and values, and where they go."""
    num_blocks, size, heads, head_dim = 6, 16, 3, 64
    shape = (2, num_blocks, size, heads, head_dim)
    if cache_dtype == "int8":
        entries = rng.integers(-127, 128, (2, *shape), np.int8)
        scales = np.full((2, *shape[:-1]), np.nan, np.float32)
    else:
        entries, scales = np.full((2, *shape), np.nan, jnp.dtype(cache_dtype)), (None, None)
    slots = rng.permutation(num_blocks * size)[:11].astype(np.int32)
    slots[-2:] = num_blocks * size
    k, v = rng.standard_normal((2, len(slots), heads, head_dim)).astype(np.float32)
    k[0] *= 1e-6
    v[1, 2, 5] = 1e5
    k[2, 1] = 0
    k[-2:] = np.nan
    unused, row = jnp.zeros(len(slots), jnp.int32), jnp.zeros(1, jnp.int32)
    meta = AttentionMeta(unused, jnp.asarray(slots), row[None], row, jnp.zeros(2, jnp.int32))
    return [*entries, *scales], k, v, meta


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_write_quantizes_its_own_slots_and_changes_no_others(backend, cache_dtype, rng):
    arrays, k, v, meta = write_problem(rng, cache_dtype)
    out = jax.jit(load(backend, CPU).write)(cache_of(*arrays), LAYER, k, v, meta)
    slots = np.asarray(meta.slots)[:-2]
    where = (LAYER, slots // 16, slots % 16)
    for cache, scales, rows, entries, written in (
        (arrays[0], arrays[2], k, out.k, out.k_scale),
        (arrays[1], arrays[3], v, out.v, out.v_scale),
    ):
        rows = rows[:-2].astype(np.float64)
        entries = np.asarray(entries).view(cache_dtype)
        found = entries[where]
        if cache_dtype == "int8":
            scale = np.asarray(written)[where].astype(np.float64)
            np.testing.assert_allclose(scale, np.abs(rows).max(-1) / 127, rtol=1e-6)
            assert np.all(np.abs(found * scale[..., None] - rows) <= 0.5001 * scale[..., None])
            scales[where] = np.asarray(written)[where]
            np.testing.assert_array_equal(written, scales)
        else:
            assert written is None
            want = np.clip(rows, -448, 448)
            unit = np.maximum(np.abs(want) / 16, 2.0**-10)
            assert np.all(np.abs(found.astype(np.float64) - want) <= unit)
        cache[where] = found
        np.testing.assert_array_equal(entries.astype(np.float32), cache.astype(np.float32))


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_write_is_in_place_when_donated(cache_dtype, rng):
    """For xla; the kernel's outputs share the memory of its operands (`pallas_kernels`)."""
    arrays, k, v, meta = write_problem(rng, cache_dtype)
    kv = cache_of(*arrays)
    write = jax.jit(load("xla", CPU).write, donate_argnums=0)
    analysis = write.lower(kv, LAYER, k, v, meta).compile().memory_analysis()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(kv))
    assert analysis.alias_size_in_bytes >= num_bytes
    assert analysis.temp_size_in_bytes < num_bytes / 4


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_step_in_a_loop_over_layers_copies_no_cache(cache_dtype):
    """As in a model: the cache is the carry of a scan that writes and reads it."""
    slots = (4, 512, 16, 3)
    held = "uint8" if cache_dtype == "float8_e4m3fn" else cache_dtype
    entries = jax.ShapeDtypeStruct((*slots, 64), held)
    scales = jax.ShapeDtypeStruct(slots, jnp.float32) if cache_dtype == "int8" else None
    kv = KVCache(entries, entries, scales, scales)
    backend = load("xla", CPU)
    row = jnp.zeros(2, jnp.int32)
    meta = AttentionMeta(row, row, row[:, None], row, jnp.arange(3), decode_only=True)

    def step(kv, q):
        def layer(carry, index):
            q, kv = carry
            kv = backend.write(kv, index, q[:, :3], q[:, 3:6], meta)
            return (backend.attend(q, kv, index, meta, scale=0.1), kv), None

        return jax.lax.scan(layer, (q, kv), jnp.arange(4))[0]

    q = jax.ShapeDtypeStruct((2, 9, 64), jnp.float32)
    analysis = jax.jit(step, donate_argnums=0).lower(kv, q).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < math.prod(entries.shape) / 4

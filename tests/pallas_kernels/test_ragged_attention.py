"""The ragged kernel, compared with numpy: mixed batches, chunks, padding, and every option."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.ragged_attention import ragged_attention, work_list
from pallas_kernels.tuning import KernelConfig

LAYER = 1
OPTIONS = ("scale", "window", "soft_cap")
# Decode rows, whole prompts, chunks of prompts, an empty row, and a request without tokens in the
# step. Contexts end on both sides of the edges of blocks and tiles.
CONTEXTS = (50, 1, 17, 16, 35, 40, 64, 0, 15)
CHUNKS = (1, 1, 1, 16, 35, 7, 24, 0, 0)

# Each case: the shape, rows of a program, keys of a tile. Together they have every supported size,
# dtype and option, and most pairs of them.
CASES = {
    "group 3": ({"num_heads": 9, "num_kv_heads": 3, "num_padding": 6}, 16, 16),
    "group 3, window": (
        {"num_heads": 6, "window": 20, "num_padding": 1, "block_size": 32},
        64,
        16,
    ),
    "group 4, cap": ({"num_heads": 8, "head_dim": 128, "soft_cap": 2.0}, 32, 32),
    "group 5, f16": ({"num_heads": 10, "dtype": "float16", "head_dim": 80, "window": 16}, 32, 16),
    "group 7, f32": (
        {"num_heads": 7, "num_kv_heads": 1, "dtype": "float32", "window": 1, "num_padding": 40},
        16,
        16,
    ),
    "group 8, fp8": (
        {"num_heads": 16, "cache_dtype": "float8_e4m3fn", "head_dim": 96, "block_size": 64},
        64,
        32,
    ),
    "group 16, int8": (
        {"num_heads": 16, "num_kv_heads": 1, "cache_dtype": "int8", "window": 33, "soft_cap": 3.0},
        16,
        64,
    ),
    "one head each": (
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 256, "block_size": 64, "window": 40},
        16,
        16,
    ),
    "one key head, group 20": ({"num_heads": 20, "num_kv_heads": 1, "head_dim": 32}, 16, 16),
    "f32, cap, window": (
        {"dtype": "float32", "head_dim": 80, "soft_cap": 1.0, "window": 17, "block_size": 32},
        64,
        32,
    ),
    "f16 queries, int8": ({"dtype": "float16", "cache_dtype": "int8", "head_dim": 16}, 32, 64),
}


@pytest.mark.parametrize(("options", "block_m", "block_n"), CASES.values(), ids=CASES.keys())
def test_ragged_equals_numpy(options, block_m, block_n, make_problem, shape):
    problem = make_problem(shape(CONTEXTS, CHUNKS, **options))
    out = ragged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        problem.query_start,
        LAYER,
        **problem.options,
        config=KernelConfig(block_m, block_n, num_warps=4, num_stages=2),
        interpret=True,
    )
    problem.check(out)


@pytest.mark.parametrize(
    ("contexts", "chunks", "num_padding"),
    [
        pytest.param((0, 0), (0, 0), 5, id="all padding"),
        pytest.param((130,), (130,), 0, id="one long prompt"),
    ],
)
def test_chooses_the_configuration(contexts, chunks, num_padding, make_problem, shape):
    problem = make_problem(shape(contexts, chunks, num_padding=num_padding))
    out = ragged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        problem.query_start,
        LAYER,
        **problem.options,
        interpret=True,
    )
    problem.check(out)


@pytest.mark.parametrize("name", ["group 3, window", "group 8, fp8"])
def test_reference_equals_numpy(name, make_problem, shape):
    problem = make_problem(shape(CONTEXTS, CHUNKS, **CASES[name][0]))
    out = jax.jit(reference.ragged_attention, static_argnames=OPTIONS)(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        problem.query_start,
        LAYER,
        **problem.options,
    )
    problem.check(out)


@pytest.mark.parametrize("block_q", [1, 5, 16])
def test_work_list_has_every_token_once(block_q, rng):
    chunks = rng.choice([0, 1, 5, 16, 17, 40], 12)
    contexts = chunks + rng.integers(0, 50, len(chunks)) * (chunks > 0)
    starts = np.cumsum([0, *chunks], dtype=np.int32)
    num_tokens = int(starts[-1]) + 9
    lens = jnp.asarray(contexts, jnp.int32)
    work = work_list(jnp.asarray(starts), lens, num_tokens=num_tokens, block_q=block_q)
    seen = {}
    for row, token, count, position in np.asarray(work).tolist():
        assert 0 <= count <= block_q
        for step in range(count):
            assert token + step not in seen
            seen[token + step] = (row, position + step)
    for row, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
        for i in range(chunk):
            assert seen.pop(starts[row] + i) == (row, context - chunk + i)
    padding = range(starts[-1], num_tokens)
    assert sorted(seen) == list(padding)
    assert all(position < 0 for _, position in seen.values())


def test_query_start_must_fit_the_rows():
    q, cache = np.zeros((2, 4, 64), np.float32), np.zeros((1, 2, 16, 2, 64), np.float32)
    table, lens = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match=r"query_start must have shape \(3,\), got \(2,\)"):
        ragged_attention(q, cache, cache, table, lens, lens, 0, scale=1.0, interpret=True)

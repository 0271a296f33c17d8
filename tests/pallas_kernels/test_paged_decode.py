"""The decode kernel, compared with numpy: every option, and contexts at the edges of blocks."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.tuning import KernelConfig

LAYER = 1
OPTIONS = ("scale", "window", "soft_cap")
CONTEXTS = (0, 1, 15, 16, 17, 70)

# Each case: the shape, keys of a tile, parts of a context. Together they have every supported
# size, dtype and option, and most pairs of them.
CASES = {
    "group 3": ({"num_heads": 9, "num_kv_heads": 3}, 16, 3),
    "group 3, one part": ({"num_heads": 9, "num_kv_heads": 3, "window": 20}, 32, 1),
    "group 4, cap": ({"num_heads": 8, "head_dim": 128, "soft_cap": 2.0, "block_size": 32}, 16, 4),
    "group 5, f16": ({"num_heads": 10, "dtype": "float16", "head_dim": 80, "window": 16}, 16, 2),
    "group 7, f32": ({"num_heads": 7, "num_kv_heads": 1, "dtype": "float32", "window": 1}, 64, 3),
    "group 8, fp8": (
        {"num_heads": 16, "cache_dtype": "float8_e4m3fn", "head_dim": 96, "block_size": 64},
        32,
        2,
    ),
    "group 16, int8": (
        {"num_heads": 16, "num_kv_heads": 1, "cache_dtype": "int8", "window": 33, "soft_cap": 3.0},
        16,
        1,
    ),
    "one head each": (
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 256, "block_size": 64},
        64,
        2,
    ),
    "one key head, group 20": ({"num_heads": 20, "num_kv_heads": 1, "head_dim": 32}, 16, 5),
    "f32, cap, window": (
        {"dtype": "float32", "head_dim": 80, "soft_cap": 1.0, "window": 17, "block_size": 32},
        16,
        3,
    ),
    "f16 queries, int8": ({"dtype": "float16", "cache_dtype": "int8", "head_dim": 16}, 64, 4),
    "bf16 queries, f32 cache": ({"cache_dtype": "float32", "head_dim": 128, "window": 48}, 32, 2),
}


@pytest.mark.parametrize(("options", "block_n", "num_splits"), CASES.values(), ids=CASES.keys())
def test_decode_equals_numpy(options, block_n, num_splits, make_problem, shape):
    problem = make_problem(shape(CONTEXTS, [1] * len(CONTEXTS), **options))
    out = paged_decode(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        LAYER,
        **problem.options,
        config=KernelConfig(block_m=16, block_n=block_n, num_warps=4, num_stages=2),
        num_splits=num_splits,
        interpret=True,
    )
    problem.check(out)


def test_chooses_the_configuration_and_the_number_of_parts(make_problem, shape):
    problem = make_problem(shape((1, 130), (1, 1)))
    out = paged_decode(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        LAYER,
        **problem.options,
        interpret=True,
    )
    problem.check(out)


@pytest.mark.parametrize("name", ["group 4, cap", "group 16, int8", "f32, cap, window"])
def test_reference_equals_numpy(name, make_problem, shape):
    problem = make_problem(shape(CONTEXTS, [1] * len(CONTEXTS), **CASES[name][0]))
    out = jax.jit(reference.paged_decode, static_argnames=OPTIONS)(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.block_tables,
        problem.seq_lens,
        LAYER,
        **problem.options,
    )
    problem.check(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72 is not supported: expected one of 16, 32, 64, 80"),
        ({"block_size": 24}, "block_size 24 is not supported: expected one of 4, 8, 16, 32, 64"),
        ({"num_heads": 129, "num_kv_heads": 1}, "at most 128 query heads .* got 129"),
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads, got 5 and 2"),
        ({"dtype": "int32"}, "dtype int32 is not supported: expected one of bfloat16"),
        ({"cache_dtype": "int16"}, "dtype of the cache int16 is not supported: .* int8"),
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"soft_cap": -1.0}, "soft_cap must be positive, got -1.0"),
    ],
)
def test_names_arguments_that_are_not_supported(change, message):
    call = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16} | change
    dtype = np.dtype(call.get("dtype", "float32"))
    q = np.zeros((1, call["num_heads"], call["head_dim"]), dtype)
    cache = np.zeros((2, 2, call["block_size"], call["num_kv_heads"], call["head_dim"]), dtype)
    cache = cache.astype(call.get("cache_dtype", dtype))
    options = {name: call[name] for name in ("window", "soft_cap") if name in call}
    table, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match=message):
        paged_decode(q, cache, cache, table, lens, LAYER, scale=1.0, interpret=True, **options)

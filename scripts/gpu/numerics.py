"""Checks every kernel against float64, on new random inputs with poison where it must not read.

A device shows errors that interpreted kernels cannot show: on a device, an index out of range
reaches other memory, uninitialised outputs hold the previous contents of the memory (here NaN), and
programs run at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.errors import accuracy_problem
from gpu.large_cache import check_large_cache
from gpu.options import Options
from gpu.report import Report
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quantization import dequantize
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.testing.problems import LAYER, TOLERANCE, Shape, make_problem

# The heads of the models, then cases that together cover every option.
HEADS: dict[str, dict[str, Any]] = {
    "llama-8b 32/8x128": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "smollm2 9/3x64": {"num_heads": 9, "num_kv_heads": 3},
    "group 7, window": {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128, "window": 100},
    "256, window, cap": {"num_heads": 8, "head_dim": 256, "window": 33, "soft_cap": 20.0},
    "96, block 32, f16": {"num_heads": 4, "head_dim": 96, "block_size": 32, "dtype": "float16"},
    "80, block 64": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 80, "block_size": 64},
    "one key head, group 71": {"num_heads": 71, "num_kv_heads": 1},
    "f32": {"num_heads": 8, "head_dim": 128, "dtype": "float32"},
    "fp8 cache": {"num_heads": 32, "num_kv_heads": 8, "cache_dtype": "float8_e4m3fn"},
    "int8 cache": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 128, "cache_dtype": "int8"},
}
TINY_HEADS = ("smollm2 9/3x64", "int8 cache")
CONTEXTS = (0, 1, 15, 16, 17, 700, 63, 64, 65, 1024)
CHUNKS = (0, 1, 15, 1, 9, 300, 63, 30, 1, 256)
FULL_TABLE = {"num_spare_columns": 0}


def run(options: Options, report: Report) -> None:
    """Checks every kernel."""
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    report.add("seed of the inputs", seed=seed)
    interpret = jax.default_backend() == "cpu"
    contexts, chunks = CONTEXTS, CHUNKS
    if options.tiny:
        contexts, chunks = (0, 1, 17, 40), (0, 1, 9, 20)
    for name, heads in HEADS.items():
        if options.tiny and name not in TINY_HEADS:
            continue
        # The last context fills the last row of the table up to the end of the table.
        decode = Shape(contexts, [1] * len(contexts), **heads, **FULL_TABLE)
        _attention(report, f"decode {name}", rng, decode, interpret)
        ragged = Shape(contexts, chunks, **heads, **FULL_TABLE, num_padding=7)
        _attention(report, f"ragged {name}", rng, ragged, interpret)
    for dtype in ("bfloat16", "float32"):
        _write(report, rng, dtype, interpret)
    for dtype in ("float8_e4m3fn", "int8"):
        _quantizing_write(report, rng, dtype, interpret)
    check_large_cache(options, report, rng)


def _attention(
    report: Report, what: str, rng: np.random.Generator, shape: Shape, interpret: bool
) -> None:
    problem = make_problem(rng, shape)
    arrays = [problem.q, problem.k_cache, problem.v_cache, problem.block_tables, problem.seq_lens]
    kernel: Callable[..., jax.Array] = paged_decode
    if what.startswith("ragged"):
        kernel = ragged_attention
        arrays.append(problem.query_start)
    on_device = [jnp.asarray(array) for array in arrays]
    _poison(problem.q.nbytes * 64)
    out = kernel(*on_device, LAYER, **problem.options, interpret=interpret)
    error = problem.error(out)
    report.add(what, problem=accuracy_problem(error, TOLERANCE[shape.dtype]), error=error)


def _write(report: Report, rng: np.random.Generator, dtype: str, interpret: bool) -> None:
    """Checks a write to the first layer; an unmasked padding slot would land in the second."""
    caches = rng.standard_normal((2, 2, 9, 16, 3, 64)).astype(jnp.dtype(dtype))
    num_slots = 9 * 16
    slots = rng.permutation(num_slots)[:50].astype(np.int32)
    slots[[3, 17, 40]] = num_slots, -1, num_slots
    rows = rng.standard_normal((2, len(slots), 3, 64)).astype(jnp.dtype(dtype))
    written = kv_write(*map(jnp.asarray, (*caches, *rows, slots)), 0, interpret=interpret)
    num_wrong = 0
    for cache, new, result in zip(caches, rows, written[:2], strict=True):
        for row, slot in zip(new, slots, strict=True):
            if 0 <= slot < num_slots:
                cache[0, slot // 16, slot % 16] = row
        num_wrong += int(np.sum(np.asarray(result) != cache))
    problem = f"{num_wrong} elements of the cache are wrong" if num_wrong else ""
    report.add(f"write {dtype}", problem=problem, wrong=num_wrong)


def _quantizing_write(
    report: Report, rng: np.random.Generator, cache_dtype: str, interpret: bool
) -> None:
    """Checks a write of all slots but those of the last block, which must keep their contents."""
    shape = (2, 9, 16, 3, 64)
    cache = jnp.ones(shape, jnp.dtype(cache_dtype))
    scale = jnp.ones(shape[:-1], jnp.float32) if cache_dtype == "int8" else None
    slots = rng.permutation(8 * 16).astype(np.int32)
    rows = rng.standard_normal((2, len(slots), *shape[3:])).astype(np.float32)
    written = kv_write(
        *(cache, cache, *map(jnp.asarray, (*rows, slots)), 0),
        k_scale=scale,
        v_scale=scale,
        interpret=interpret,
    )
    num_wrong = 0
    for new, entries, scales in zip(rows, written[:2], written[2:], strict=True):
        found = np.asarray(dequantize(entries, scales)).astype(np.float64)
        num_wrong += int(np.sum(found[1] != 1) + np.sum(found[0, 8] != 1))
        # Half a scale, or half a unit of a number with 3 bits after the point.
        unit = np.maximum(np.abs(new) / 16, 2.0**-10)
        if scales is not None:
            unit = np.abs(new).max(-1, keepdims=True) / 254 * 1.001
        error = np.abs(found[0, :8].reshape(-1, *shape[3:])[slots] - new)
        num_wrong += int(np.sum(~(error <= unit)))
    problem = f"{num_wrong} elements of the cache are wrong" if num_wrong else ""
    report.add(f"write {cache_dtype}", problem=problem, wrong=num_wrong)


def _poison(num_bytes: int) -> None:
    """Fills memory with NaN and frees it, so that the next outputs are allocated in it."""
    filled = [jnp.full(num_bytes // 8, jnp.nan, jnp.float32) for _ in range(2)]
    jax.block_until_ready(filled)

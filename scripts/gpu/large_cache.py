"""Checks the kernels at the end of a cache of more than 4 GiB, where offsets do not fit 32 bits.

Real caches are that large, but those of the other checks are small.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gpu.errors import accuracy_problem
from gpu.options import Options
from gpu.report import Report
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.testing.problems import LAYER, TOLERANCE, Shape, make_problem

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
CONTEXTS, CHUNKS = (1, 17, 200), (1, 9, 100)
# A block has 32 KiB in each of two layers, so this is 4.6 GB.
NUM_BLOCKS = 70_000


def check_large_cache(options: Options, report: Report, rng: np.random.Generator) -> None:
    """Checks decode, ragged attention and a write, all in the last blocks of the last layer."""
    problem = make_problem(rng, Shape(CONTEXTS, CHUNKS, **HEADS))
    num_blocks = 64 if options.tiny else NUM_BLOCKS
    needed = 5 * problem.k_cache[:, :1].nbytes * num_blocks
    stats = jax.devices()[0].memory_stats() or {}
    if needed > stats.get("bytes_limit", needed):
        report.add("large cache skipped", why=f"needs {needed / 1e9:.0f} GB")
        return
    interpret = jax.default_backend() == "cpu"
    first = num_blocks - problem.k_cache.shape[1]
    k, v = (_at_the_end(cache, num_blocks) for cache in (problem.k_cache, problem.v_cache))
    tables, lens = jnp.asarray(problem.block_tables + first), jnp.asarray(problem.seq_lens)
    call = {**problem.options, "interpret": interpret}
    starts = jnp.asarray(problem.query_start)
    out = ragged_attention(jnp.asarray(problem.q), k, v, tables, lens, starts, LAYER, **call)
    error = problem.error(out)
    wrong = accuracy_problem(error, TOLERANCE["bfloat16"])
    report.add("ragged large cache", problem=wrong, error=error)

    newest = problem.query_start[1:] - 1
    decoded = paged_decode(jnp.asarray(problem.q[newest]), k, v, tables, lens, LAYER, **call)
    difference = np.asarray(decoded).astype(np.float64) - problem.expected[newest]
    size = np.linalg.norm(problem.expected[newest], axis=-1)
    error = float(np.max(np.linalg.norm(difference, axis=-1) / size))
    wrong = accuracy_problem(error, TOLERANCE["bfloat16"])
    report.add("decode large cache", problem=wrong, error=error)

    rows = rng.standard_normal((2, 40, *k.shape[3:])).astype(k.dtype)
    slots = num_blocks * 16 - 1 - rng.permutation(64)[:40].astype(np.int32)
    write = jax.jit(functools.partial(kv_write, interpret=interpret), donate_argnums=(0, 1))
    written = write(k, v, *map(jnp.asarray, (*rows, slots)), LAYER)
    found = [np.asarray(cache[LAYER, slots // 16, slots % 16]) for cache in written[:2]]
    num_wrong = int(np.sum(np.stack(found) != rows))
    wrong = f"{num_wrong} elements of the cache are wrong" if num_wrong else ""
    report.add("write large cache", problem=wrong, wrong=num_wrong)


def _at_the_end(cache: np.ndarray, num_blocks: int) -> jax.Array:
    """Returns a cache of ``num_blocks`` blocks that ends with ``cache`` and is NaN before it."""
    layers, used, *rest = cache.shape

    @jax.jit
    def placed(last: jax.Array) -> jax.Array:
        whole = jnp.full((layers, num_blocks, *rest), jnp.nan, last.dtype)
        return whole.at[:, num_blocks - used :].set(last)

    return placed(jnp.asarray(cache))

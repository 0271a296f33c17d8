"""Paged attention for decode: one query token per request, and contexts cut into splits (split-K).

A decode step reads every cached key and value once and does little arithmetic with each, so it runs
at memory bandwidth if enough programs read at the same time. One program takes one request, one KV
head and one split of the context. The query heads of the group share each tile that the program
reads. They are padded to 16 rows, the minimum of the matrix units. The padding costs arithmetic,
which is abundant, and no memory traffic. With few requests, each context has several splits, enough
to fill the device about twice, and a second small kernel merges their results. With many requests
there is one split and no second kernel.

The number of splits is fixed when the step is compiled. The kernel computes the length of each
split from the real length of the context. So a compiled step serves every context, and empty splits
cost nothing. KV heads vary fastest over neighbouring programs, because the cache stores the heads
of a token contiguously.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import _attention, _triton, limits, tuning
from pallas_kernels._attention import AttentionSpec, KVSource
from pallas_kernels.tuning import KernelConfig


@functools.partial(
    jax.jit,
    static_argnames=("scale", "window", "soft_cap", "config", "num_splits", "interpret"),
)
def paged_decode(
    q: Num[Array, "rows heads _"],
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    block_tables: Int32[Array, "_ width"],
    seq_lens: Int32[Array, " _"],
    layer: limits.LayerIndex,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
    config: KernelConfig | None = None,
    num_splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "rows heads head_dim"]:
    """Computes attention of each request's newest token over its whole cached context.

    Args:
      q: [num_rows, num_heads, head_dim], bfloat16, float16 or float32; row r is the query at
        position ``seq_lens[r] - 1`` of request r. The ``group`` query heads from ``k * group`` on
        share KV head k.
      k_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], a dtype of
        `limits.CACHE_DTYPES`. Slots without a live token may hold anything, NaN included.
      v_cache: the same shape and dtype.
      block_tables: i32[num_rows, width], the blocks of each request in order, in [0, num_blocks).
        Entries past the end of the context may hold anything.
      seq_lens: i32[num_rows], tokens of each request in the cache, in [0, width * block_size].
      layer: the layer to read, in [0, num_layers); may be traced.
      scale: factor of the scores.
      window: a query at position p sees positions above ``p - window``; None for no limit.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; None for no cap.
      k_scale: `limits.Scales` of a key cache of int8; None for every other dtype.
      v_scale: the same for the values.
      config: tile sizes; None for those of `tuning`.
      num_splits: splits of each context, at least 1; None for enough to fill a device of 132
        multiprocessors.
      interpret: run as plain jax operations, which is slow but works on any device.

    Returns:
      [num_rows, num_heads, head_dim] in the dtype of ``q``; zeros where ``seq_lens`` is 0.

    Raises:
      ValueError: a shape, dtype or value is not supported.
    """
    limits.check_cache(k_cache, v_cache, k_scale, v_scale)
    attention = AttentionSpec.of(q, k_cache, scale=scale, window=window, soft_cap=soft_cap)
    num_rows, width = q.shape[0], block_tables.shape[1]
    limits.check_shape("block_tables", block_tables, (num_rows, width))
    limits.check_shape("seq_lens", seq_lens, (num_rows,))
    config = config or tuning.kernel_config(
        tuning.DECODE, head_dim=attention.head_dim, group=attention.group, dtype=attention.dot_dtype
    )
    num_splits = num_splits or tuning.decode_splits(
        num_rows=num_rows,
        num_kv_heads=attention.num_kv_heads,
        max_context=width * attention.block_size,
        block_n=config.block_n,
    )
    results = _triton.call(
        functools.partial(
            _decode_kernel, attention=attention, block_n=config.block_n, num_splits=num_splits
        ),
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        _triton.as_operand(layer),
        k_scale,
        v_scale,
        name="paged_decode",
        grid=(attention.num_kv_heads, num_rows, num_splits),
        out_shape=_outputs(q, num_splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if num_splits == 1:
        return results[0]
    return _merge(*results, dtype=q.dtype, interpret=interpret)


def _outputs(q: Num[Array, "rows heads head_dim"], num_splits: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the outputs of the kernel: those of the attention, or the arguments of `_merge`."""
    if num_splits == 1:
        return [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    num_rows, num_heads, head_dim = q.shape
    return [
        jax.ShapeDtypeStruct((num_rows, num_splits, num_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_splits, num_heads), jnp.float32),
    ]


def _decode_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    seq_lens_ref: Any,
    layer_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    out_ref: Any,
    lse_ref: Any = None,
    *,
    attention: AttentionSpec,
    block_n: int,
    num_splits: int,
) -> None:
    """One program: the queries of one group over one split of one request's context."""
    kv_head, row, split = (_triton.program_id(axis) for axis in range(3))
    layer = layer_ref[0]
    source = KVSource(k_ref, v_ref, k_scale_ref, v_scale_ref, table_ref, row, layer, kv_head)
    context = seq_lens_ref[row]
    start = jnp.int32(0)
    if attention.window is not None:
        start = jnp.maximum(context - attention.window, 0)

    #   tiles:   first ... lo ......... hi ... last     of block_n positions each
    # Split 0 takes the first tiles_per_split tiles, and so on. The last splits may be empty.
    first = lax.div(start, jnp.int32(block_n))
    last = lax.div(context + (block_n - 1), jnp.int32(block_n))
    tiles_per_split = lax.div(last - first + (num_splits - 1), jnp.int32(num_splits))
    lo = first + split * tiles_per_split
    hi = jnp.minimum(lo + tiles_per_split, last)

    # Padding rows have the indices of the following heads, masked, so that no index occurs twice.
    num_queries = max(16, _triton.power_of_two(attention.group))
    queries = jnp.arange(num_queries, dtype=jnp.int32)
    heads = kv_head * attention.group + queries
    is_query = queries < attention.group
    mask = _attention.rows_mask(is_query, attention)
    dims = _attention.dims(attention)
    q = _triton.load(q_ref.at[row, heads[:, None], dims], mask).astype(attention.dot_dtype)
    offsets = jnp.arange(block_n, dtype=jnp.int32)

    def visit(tile: Int32[Array, ""], state: _attention.Softmax) -> _attention.Softmax:
        positions = tile * block_n + offsets
        live = (positions >= start) & (positions < context)
        kv = _attention.load_tile(source, positions, live, attention)
        s = _attention.scores(q, kv, attention)
        return _attention.add_tile(state, _attention.mask_scores(s, live[None, :]), kv)

    state = lax.fori_loop(lo, hi, visit, _attention.empty_softmax(num_queries, attention))
    out = _attention.normalized(state)
    if num_splits == 1:
        where = out_ref.at[row, heads[:, None], dims]
        _triton.store(where, out.astype(out_ref.dtype), mask=mask)
    else:
        # An empty split stores no output. Its lse of -inf tells the merge pass.
        not_empty = mask & (hi > lo)
        _triton.store(out_ref.at[row, split, heads[:, None], dims], out, mask=not_empty)
        lse = state.maximum + jnp.log2(state.total)
        _triton.store(lse_ref.at[row, split, heads], lse, mask=is_query)


def _merge(
    partial: Float32[Array, "rows splits heads head_dim"],
    lse: Float32[Array, "rows splits heads"],
    *,
    dtype: Any,
    interpret: bool,
) -> Float[Array, "rows heads head_dim"]:
    """Merges the splits of each context.

    Args:
      partial: f32[num_rows, num_splits, num_heads, head_dim], the output over each split alone;
        uninitialised for empty splits.
      lse: f32[num_rows, num_splits, num_heads], log2 of the sum of exponentials over each split;
        -inf for empty splits.
      dtype: dtype of the result.
      interpret: run as plain jax operations.

    Returns:
      [num_rows, num_heads, head_dim].
    """
    num_rows, num_splits, num_heads, head_dim = partial.shape
    elements = _triton.power_of_two(num_splits) * _triton.power_of_two(head_dim)
    (out,) = _triton.call(
        functools.partial(_merge_kernel, num_splits=num_splits, head_dim=head_dim),
        partial,
        lse,
        name="paged_decode_merge",
        grid=(num_heads, num_rows),
        out_shape=[jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), dtype)],
        num_warps=1 if elements <= 1024 else 4,
        num_stages=1,
        interpret=interpret,
    )
    return out


def _merge_kernel(
    partial_ref: Any, lse_ref: Any, out_ref: Any, *, num_splits: int, head_dim: int
) -> None:
    """One program: one query head of one request."""
    head, row = _triton.program_id(0), _triton.program_id(1)
    splits = jnp.arange(_triton.power_of_two(num_splits), dtype=jnp.int32)
    dims = jnp.arange(_triton.power_of_two(head_dim), dtype=jnp.int32)
    is_split, is_dim = splits < num_splits, dims < head_dim

    lse = _triton.load(lse_ref.at[row, splits, head], is_split)
    lse = jnp.where(is_split, lse, float("-inf"))
    maximum = jnp.max(lse, axis=0)
    weights = jnp.exp2(lse - jnp.where(maximum == float("-inf"), 0.0, maximum))

    not_empty = (weights > 0.0)[:, None] & is_dim[None, :]
    partial = _triton.load(partial_ref.at[row, splits[:, None], head, dims[None, :]], not_empty)
    total = jnp.sum(weights, axis=0)
    out = jnp.sum(partial * weights[:, None], axis=0) / jnp.where(total == 0.0, 1.0, total)
    _triton.store(out_ref.at[row, head, dims], out.astype(out_ref.dtype), mask=is_dim)

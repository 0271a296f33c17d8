"""Paged attention over a packed step: chunks of prompts and single tokens of many requests.

One program takes ``block_q`` consecutive tokens of one request with every query head of one group.
These are ``block_q * group`` rows of a matrix product. The program goes through the request's
context from the first visible key to the last. Because all heads of a group are rows of the same
product, they share each tile of keys that is read, and a group of any size fills the rows: with a
group of 3, 64 rows hold 21 tokens and one idle row. Neighbouring programs take neighbouring tokens
of the same KV head, so they find each other's keys in the cache of the chip.

A list assigns tokens to programs. It is computed once from ``query_start`` and is the same for
every layer. Its length must be fixed when the step is compiled, so the list is long enough for any
mixture of requests: ``num_tokens // block_q`` plus one for each request. Surplus programs return at
once. Padding tokens get programs too, which store zeros.

Along the context, tiles that every row sees in full need no mask:

      keys:   | window edge | full tiles ............ | diagonal |
      masked:       yes            no                     yes
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels import _attention, _triton, limits, tuning
from pallas_kernels._attention import AttentionSpec, KVSource, Softmax
from pallas_kernels.tuning import KernelConfig


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "config", "interpret"))
def ragged_attention(
    q: Num[Array, "tokens heads _"],
    k_cache: limits.Cache,
    v_cache: limits.Cache,
    block_tables: Int32[Array, "rows width"],
    seq_lens: Int32[Array, " _"],
    query_start: Int32[Array, " _"],
    layer: limits.LayerIndex,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: limits.Scales | None = None,
    v_scale: limits.Scales | None = None,
    config: KernelConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Computes causal attention of each request's tokens in a step over its cached context.

    Args:
      q: [num_tokens, num_heads, head_dim], bfloat16, float16 or float32. The tokens of request r
        are ``query_start[r] : query_start[r + 1]``, the last ones of its context. The ``group``
        query heads from ``k * group`` on share KV head k.
      k_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], a dtype of
        `limits.CACHE_DTYPES`. Slots without a live token may hold anything, NaN included.
      v_cache: the same shape and dtype.
      block_tables: i32[num_rows, width], the blocks of each request in order, in [0, num_blocks).
        Entries past the end of the context may hold anything.
      seq_lens: i32[num_rows], tokens of each request in the cache, this step's tokens included, in
        [0, width * block_size].
      query_start: i32[num_rows + 1], non-decreasing from 0, at most num_tokens. Tokens from the
        last entry on are padding.
      layer: the layer to read, in [0, num_layers); may be traced.
      scale: factor of the scores.
      window: a query at position p sees positions above ``p - window``; None for no limit.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; None for no cap.
      k_scale: `limits.Scales` of a key cache of int8; None for every other dtype.
      v_scale: the same for the values.
      config: tile sizes; None for those of `tuning`.
      interpret: run as plain jax operations, which is slow but works on any device.

    Returns:
      [num_tokens, num_heads, head_dim] in the dtype of ``q``; zeros for padding.

    Raises:
      ValueError: a shape, dtype or value is not supported.
    """
    limits.check_cache(k_cache, v_cache, k_scale, v_scale)
    attention = AttentionSpec.of(q, k_cache, scale=scale, window=window, soft_cap=soft_cap)
    num_rows, width = block_tables.shape
    limits.check_shape("block_tables", block_tables, (num_rows, width))
    limits.check_shape("seq_lens", seq_lens, (num_rows,))
    limits.check_shape("query_start", query_start, (num_rows + 1,))
    config = config or tuning.kernel_config(
        tuning.RAGGED,
        head_dim=attention.head_dim,
        group=attention.group,
        dtype=attention.dot_dtype,
    )
    block_m = max(config.block_m, _triton.power_of_two(attention.group))
    block_q = block_m // attention.group
    work = work_list(query_start, seq_lens, num_tokens=q.shape[0], block_q=block_q)
    (out,) = _triton.call(
        functools.partial(
            _ragged_kernel, attention=attention, block_m=block_m, block_n=config.block_n
        ),
        q,
        k_cache,
        v_cache,
        block_tables,
        work,
        _triton.as_operand(layer),
        k_scale,
        v_scale,
        name="ragged_attention",
        grid=(work.shape[0], attention.num_kv_heads),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out


def work_list(
    query_start: Int32[Array, " starts"],
    seq_lens: Int32[Array, " starts-1"],
    *,
    num_tokens: int,
    block_q: int,
) -> Int32[Array, "programs 4"]:
    """Returns the tokens that each program along the grid works on.

    Request i owns the entries from ``query_start[i] // block_q + i`` on: one entry for every
    ``block_q`` of its tokens, rounded up. Padding counts as another request, whose tokens have
    negative positions and therefore see nothing.

    Returns:
      i32[n, 4]: row of the block tables, first token, number of tokens (in [0, block_q]), and
      position of the first token in its request.
    """
    num_rows = seq_lens.shape[0]
    starts = jnp.append(query_start, num_tokens)
    lens = jnp.append(seq_lens, 0)
    first_entry = starts[:-1] // block_q + jnp.arange(num_rows + 1, dtype=jnp.int32)
    entry = jnp.arange(num_tokens // block_q + num_rows + 1, dtype=jnp.int32)
    # The count is a single reduction. A binary search would be a loop, which breaks CUDA graphs.
    row = jnp.sum(first_entry[None, :] <= entry[:, None], axis=1, dtype=jnp.int32) - 1
    token = starts[row] + (entry - first_entry[row]) * block_q
    count = jnp.clip(starts[row + 1] - token, 0, block_q)
    position = lens[row] - starts[row + 1] + token
    return jnp.stack([row, token, count, position], axis=1)


def _ragged_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    work_ref: Any,
    layer_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    out_ref: Any,
    *,
    attention: AttentionSpec,
    block_m: int,
    block_n: int,
) -> None:
    """One program: up to ``block_q`` tokens of one request, with the query heads of one group."""
    entry, kv_head = _triton.program_id(0), _triton.program_id(1)
    row, token, count, position = (work_ref[entry, field] for field in range(4))
    layer = layer_ref[0]
    source = KVSource(k_ref, v_ref, k_scale_ref, v_scale_ref, table_ref, row, layer, kv_head)

    # Rows are (token, head) pairs. Surplus rows point past the last token, so that no index occurs
    # twice.
    index = jnp.arange(block_m, dtype=jnp.int32)
    offset = lax.div(index, jnp.int32(attention.group))
    is_query = offset < count
    tokens = jnp.where(is_query, token + offset, q_ref.shape[0])
    heads = kv_head * attention.group + lax.rem(index, jnp.int32(attention.group))
    mask = _attention.rows_mask(is_query, attention)
    where = (tokens[:, None], heads[:, None], _attention.dims(attention))
    q = _triton.load(q_ref.at[where], mask).astype(attention.dot_dtype)
    positions = position + offset
    tile_offsets = jnp.arange(block_n, dtype=jnp.int32)
    start, full_from, full_to, stop = _tile_ranges(attention, position, count, block_n)

    def visit(tile: Int32[Array, ""], state: Softmax, *, masked: bool) -> Softmax:
        keys = tile * block_n + tile_offsets
        live = None
        if masked:
            live = keys < position + count
            if attention.window is not None:
                live &= keys > position - attention.window
        kv = _attention.load_tile(source, keys, live, attention)
        s = _attention.scores(q, kv, attention)
        if masked:
            visible = keys[None, :] <= positions[:, None]
            if attention.window is not None:
                visible &= keys[None, :] > positions[:, None] - attention.window
            s = _attention.mask_scores(s, visible)
        return _attention.add_tile(state, s, kv)

    state = _attention.empty_softmax(block_m, attention)
    if attention.window is not None:
        state = lax.fori_loop(start, full_from, functools.partial(visit, masked=True), state)
    state = lax.fori_loop(full_from, full_to, functools.partial(visit, masked=False), state)
    state = lax.fori_loop(full_to, stop, functools.partial(visit, masked=True), state)
    out = _attention.normalized(state)
    _triton.store(out_ref.at[where], out.astype(out_ref.dtype), mask=mask)


def _tile_ranges(
    attention: AttentionSpec, position: Int32[Array, ""], count: Int32[Array, ""], block_n: int
) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
    """Returns the tiles that the queries at ``position : position + count`` see.

    Returns:
      start, full_from, full_to, stop: at least one row sees a part of each tile of
      ``start : stop``, and every row sees all of each tile of ``full_from : full_to``. The four are
      non-decreasing, and equal if no key is visible.
    """
    size = jnp.int32(block_n)
    end = jnp.where(count > 0, jnp.maximum(position + count, 0), 0)
    stop = lax.div(end + (block_n - 1), size)
    full_to = lax.div(jnp.maximum(jnp.minimum(position + 1, end), 0), size)
    if attention.window is None:
        zero = jnp.int32(0)
        return zero, zero, full_to, stop
    # The first row sees the lowest keys. The lowest key of the last row is visible to every row.
    start = jnp.minimum(lax.div(jnp.maximum(position - attention.window + 1, 0), size), stop)
    lowest = jnp.maximum(position + count - attention.window, 0)
    full_from = jnp.clip(lax.div(lowest + (block_n - 1), size), start, stop)
    return start, full_from, jnp.maximum(full_to, full_from), stop

"""Paged attention over a packed step: chunks of prompts and single tokens of many requests.

How the work is split. One program takes ``block_q`` consecutive tokens of one request with every
query head of one group, ``block_q * group`` rows of a matrix product, and walks over the request's
context from the first visible key to the last. Packing the heads of a group into the rows means
that each tile of keys is read once for all of them, and that a group of any size fills the rows
(with a group of 3, 64 rows hold 21 tokens and one idle row). Neighbouring programs are neighbouring
tokens of the same key head, so they find each other's keys in the cache of the chip.

Which program works on which tokens is a list that is computed once from ``query_start`` and is the
same for every layer. Its length must be fixed when the step is compiled, so it is the most that any
mix of requests can need: ``num_tokens // block_q`` plus one for each request. Programs left over
return at once; padding tokens get programs too, which store zeros.

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

from pallas_kernels import _attention, _triton, limits, tuning
from pallas_kernels._attention import Attention, KVSource, Softmax
from pallas_kernels.tuning import KernelConfig


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "config", "interpret"))
def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    layer: jax.Array | int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: KernelConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each request's tokens in a step over its cached context.

    Args:
      q: [num_tokens, num_heads, head_dim], bfloat16, float16 or float32; the tokens of request r
        are ``query_start[r] : query_start[r + 1]`` and the last ones of its context. Query heads
        ``k * group`` and on, ``group`` of them, share key head k.
      k_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], a dtype of
        `limits.CACHE_DTYPES`; slots that hold no live token may hold anything, NaN included.
      v_cache: the same shape and dtype.
      block_tables: i32[num_rows, width], the blocks of each request in order, in [0, num_blocks);
        entries that its length does not reach may hold anything.
      seq_lens: i32[num_rows], tokens of each request in the cache, those of the step included, in
        [0, width * block_size].
      query_start: i32[num_rows + 1], non-decreasing from 0, at most num_tokens. Tokens from the
        last entry on are padding.
      layer: index of the layer to read, in [0, num_layers); may be traced.
      scale: what scores are multiplied by.
      window: a query at position p sees positions above ``p - window``; None for all.
      soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)``; None to leave them.
      k_scale: f32[num_layers, num_kv_heads], positive: what the entries of an 8-bit key cache are
        multiplied by; None for 1 (not with int8).
      v_scale: the same for the values.
      config: tile sizes; None to look them up.
      interpret: run on any device, slowly.

    Returns:
      [num_tokens, num_heads, head_dim] in the dtype of ``q``; zeros for padding.

    Raises:
      ValueError: a shape, dtype or value that is not supported.
    """
    limits.check_cache(k_cache, v_cache, k_scale, v_scale)
    attention = Attention.of(q, k_cache, scale=scale, window=window, soft_cap=soft_cap)
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
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
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
    query_start: jax.Array, seq_lens: jax.Array, *, num_tokens: int, block_q: int
) -> jax.Array:
    """What each program along the tokens works on.

    Request i owns the entries from ``query_start[i] // block_q + i`` on, which leaves it one for
    each ``block_q`` of its tokens and a part of that. Padding is one more request, whose tokens
    have negative positions and so see nothing.

    Returns:
      i32[n, 4]: row of the block tables, first token, number of tokens (in [0, block_q]), and
      position of the first token in its request.
    """
    num_rows = seq_lens.shape[0]
    starts = jnp.append(query_start, num_tokens)
    lens = jnp.append(seq_lens, 0)
    first_entry = starts[:-1] // block_q + jnp.arange(num_rows + 1, dtype=jnp.int32)
    entry = jnp.arange(num_tokens // block_q + num_rows + 1, dtype=jnp.int32)
    # Counting is a single reduction; a binary search would be a loop, which breaks CUDA graphs.
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
    attention: Attention,
    block_m: int,
    block_n: int,
) -> None:
    """One program: some tokens of one request, with the query heads of one group."""
    entry, kv_head = _triton.program_id(0), _triton.program_id(1)
    row, token, count, position = (work_ref[entry, field] for field in range(4))
    layer = layer_ref[0]
    source = KVSource(k_ref, v_ref, table_ref, row, layer, kv_head)

    # Rows are (token, head) pairs. Those left over point past the last token, so that no index
    # is used twice.
    index = jnp.arange(block_m, dtype=jnp.int32)
    step = lax.div(index, jnp.int32(attention.group))
    is_query = step < count
    tokens = jnp.where(is_query, token + step, q_ref.shape[0])
    heads = kv_head * attention.group + lax.rem(index, jnp.int32(attention.group))
    mask = _attention.rows_mask(is_query, attention)
    where = (tokens[:, None], heads[:, None], _attention.dims(attention))
    q = _triton.load(q_ref.at[where], mask).astype(attention.dot_dtype)
    k_scale = _attention.load_scale(k_scale_ref, layer, kv_head)
    positions = position + step
    offsets = jnp.arange(block_n, dtype=jnp.int32)
    start, full_from, full_to, stop = _tile_ranges(attention, position, count, block_n)

    def visit(tile: jax.Array, state: Softmax, *, masked: bool) -> Softmax:
        keys = tile * block_n + offsets
        live = None
        if masked:
            live = keys < position + count
            if attention.window is not None:
                live &= keys > position - attention.window
        k, v = _attention.load_tile(source, keys, live, attention)
        s = _attention.scores(q, k, k_scale, attention)
        if masked:
            visible = keys[None, :] <= positions[:, None]
            if attention.window is not None:
                visible &= keys[None, :] > positions[:, None] - attention.window
            s = _attention.mask_scores(s, visible)
        return _attention.add_tile(state, s, v)

    state = _attention.empty_softmax(block_m, attention)
    if attention.window is not None:
        state = lax.fori_loop(start, full_from, functools.partial(visit, masked=True), state)
    state = lax.fori_loop(full_from, full_to, functools.partial(visit, masked=False), state)
    state = lax.fori_loop(full_to, stop, functools.partial(visit, masked=True), state)
    out = _attention.normalized(state, _attention.load_scale(v_scale_ref, layer, kv_head))
    _triton.store(out_ref.at[where], out.astype(out_ref.dtype), mask=mask)


def _tile_ranges(
    attention: Attention, position: jax.Array, count: jax.Array, block_n: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Tiles that the rows at positions ``position : position + count`` see.

    Returns:
      start, full_from, full_to, stop: some row sees a part of tiles ``start : stop``, every row
      sees all of tiles ``full_from : full_to``. Non-decreasing; all equal if there is nothing to
      see.
    """
    size = jnp.int32(block_n)
    end = jnp.where(count > 0, jnp.maximum(position + count, 0), 0)
    stop = lax.div(end + (block_n - 1), size)
    full_to = lax.div(jnp.maximum(jnp.minimum(position + 1, end), 0), size)
    if attention.window is None:
        zero = jnp.int32(0)
        return zero, zero, full_to, stop
    # The first row sees the lowest keys, the last row's lowest key is visible to every row.
    start = jnp.minimum(lax.div(jnp.maximum(position - attention.window + 1, 0), size), stop)
    lowest = jnp.maximum(position + count - attention.window, 0)
    full_from = jnp.clip(lax.div(lowest + (block_n - 1), size), start, stop)
    return start, full_from, jnp.maximum(full_to, full_from), stop

"""Adds the output of a layer to the residual stream and normalises the sum, in one pass.

How the work is split. One program takes one token and keeps its whole row in registers, so the sum
is read and written once instead of three times. It is rounded to the dtype of the residual stream
before it is normalised, and again before it is multiplied with the weight: the result is that of
the operations one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _triton, limits
from pallas_kernels._triton import power_of_two

MAX_SIZE = 16384


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``residual + x``, and its RMS norm.

    Args:
      x: [num_tokens, size], bfloat16, float16 or float32; size at most `MAX_SIZE`.
      residual: the same shape and dtype; its memory is taken over by the sum if it is donated.
      weight: [size], any float dtype: what the normalised row is multiplied by.
      eps: added to the mean of squares.
      interpret: run on any device, slowly.

    Returns:
      The normalised sum and the sum, both like ``x``.

    Raises:
      ValueError: a shape or dtype that is not supported.
    """
    limits.check_dtype("dtype of x", x.dtype)
    num_tokens, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of up to {MAX_SIZE} elements are supported, got {size}")
    limits.check_shape("residual", residual, x.shape)
    limits.check_shape("weight", weight, (size,))
    if residual.dtype != x.dtype:
        raise ValueError(f"residual is {residual.dtype.name}, x is {x.dtype.name}")
    normalized, total = _triton.call(
        functools.partial(_add_rms_norm_kernel, eps=eps),
        x,
        residual,
        weight,
        name="add_rms_norm",
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        num_warps=min(16, max(1, power_of_two(size) // 512)),
        num_stages=1,
        aliases={1: 1},
        interpret=interpret,
    )
    return normalized, total


def _add_rms_norm_kernel(
    x_ref: Any, residual_ref: Any, weight_ref: Any, out_ref: Any, total_ref: Any, *, eps: float
) -> None:
    """One program: one token."""
    token = _triton.program_id(0)
    size = x_ref.shape[1]
    element = jnp.arange(power_of_two(size), dtype=jnp.int32)
    mask = element < size
    x = _triton.load(x_ref.at[token, element], mask).astype(jnp.float32)
    residual = _triton.load(residual_ref.at[token, element], mask).astype(jnp.float32)
    weight = _triton.load(weight_ref.at[element], mask).astype(jnp.float32)
    total = (x + residual).astype(total_ref.dtype)
    _triton.store(total_ref.at[token, element], total, mask=mask)
    h = total.astype(jnp.float32)
    h *= lax.rsqrt(jnp.sum(h * h, axis=0) / size + eps)
    out = h.astype(out_ref.dtype).astype(jnp.float32) * weight
    _triton.store(out_ref.at[token, element], out.astype(out_ref.dtype), mask=mask)

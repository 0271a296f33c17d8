"""The only module that knows the Triton backend of Pallas.

jax has deprecated that backend since 0.11. The kernels use it only through this file, so a move to
another backend starts here.

Two properties of the backend shape every kernel. First, references are whole arrays in global
memory. Every dimension is indexed with an integer array, because interpret mode refuses a mixture
of integer arrays and slices. Second, a masked store in interpret mode writes the old value back to
the lanes that are masked off. So the index of such a lane must differ from those of all live lanes:
it must be unique, or positive and out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int32, Num

store = plgpu.store
program_id = pl.program_id


def load(
    ref: Any, mask: Bool[Array, "*shape"] | None = None, *, other: int = 0
) -> Num[Array, "*shape"]:
    """Returns the contents of ``ref``, with ``other`` where ``mask`` is false.

    ``ref`` is a reference, or ``reference.at[index]``.
    """
    if mask is None:
        return plgpu.load(ref)
    # The backend does not convert `other` between integers and floats.
    kind = float if jnp.issubdtype(ref.dtype, jnp.floating) else int
    return plgpu.load(ref, mask=mask, other=kind(other))


def power_of_two(n: int) -> int:
    """Returns the smallest power of two >= ``n``; the backend supports no other array sizes."""
    return 1 << (n - 1).bit_length()


def as_operand(number: Int32[Array, ""] | int) -> Int32[Array, " 1"]:
    """Returns an integer as an operand of `call`, which takes arrays only."""
    return jnp.reshape(jnp.asarray(number, jnp.int32), (1,))


def call(
    kernel: Callable[..., None],
    *operands: jax.Array | None,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool,
) -> Any:
    """Runs ``kernel`` once for each point of ``grid`` and returns its outputs as a list.

    Args:
      kernel: takes a reference for each operand, then one for each output.
      operands: whole arrays; for None the kernel gets None instead of a reference.
      name: name of the kernel in profiles.
      grid: up to three sizes. The index along the first varies fastest over neighbouring programs.
      out_shape: shape and dtype of each output. Elements that no program stores are uninitialised.
      num_warps: warps of 32 threads in a program.
      num_stages: iterations of a loop over loads that the compiler keeps in flight.
      aliases: operand number -> number of the output that takes over its memory.
      interpret: run as plain jax operations, which is slow but works on any device.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        # Always given: without these parameters, some versions of jax choose another backend.
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)

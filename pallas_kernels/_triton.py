"""The only module that knows the Triton backend of Pallas.

That backend is deprecated since jax 0.11, so everything the kernels need of it passes through here:
to move the kernels to another backend, start with this file.

Two habits of the backend shape every kernel. References are whole arrays in global memory, indexed
with integer arrays in every dimension (interpret mode refuses integer arrays mixed with slices).
And a masked store in interpret mode writes the old value back in the lanes that are masked off, so
no such lane may have the index of a live one: it must be unique, or out of range and positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

store = plgpu.store
program_id = pl.program_id


def load(ref: Any, mask: jax.Array | None = None, *, other: int = 0) -> jax.Array:
    """What ``ref`` (a reference, or ``reference.at[index]``) holds; ``other`` where masked off."""
    if mask is None:
        return plgpu.load(ref)
    kind = float if jnp.issubdtype(ref.dtype, jnp.floating) else int  # not converted by itself
    return plgpu.load(ref, mask=mask, other=kind(other))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``: the backend takes no other array sizes."""
    return 1 << (n - 1).bit_length()


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
      operands: whole arrays, or None, which the kernel is given as it is.
      name: of the kernel, as profilers show it.
      grid: up to three sizes; the first one varies fastest over neighbouring programs.
      out_shape: of each output. What no program stores is uninitialised memory.
      num_warps: warps of 32 threads that run one program.
      num_stages: how many iterations of a loop over loads the compiler keeps in flight.
      aliases: operand number -> output number that takes over its memory.
      interpret: run as plain jax operations, on any device and slowly.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        # Never left out: without it some versions of jax choose another backend.
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)

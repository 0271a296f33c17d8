"""Weights as integers of 8 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32
from jaxtyping import Int8 as Int8Array

from jaxserve.errors import CheckpointError
from jaxserve.ops.linear import ArraySpec, Leaves, Matrix, as_matrix, product

CHUNK_ELEMENTS = 1 << 20
"""The most elements of a weight that are converted to float32 at once."""

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""The scale of outputs that are zero or nearly so. Devices take a smaller number for zero."""

MAX_ROWS_OF_TWO_TERMS = 64
"""With more rows, a CPU spends less time on widening the weight than on a second product."""


@dataclass(frozen=True, slots=True)
class Int8:
    """Integers of 8 bits with a scale f32 for each output, quantised when the weight is loaded.

    The product is that of the inputs as they are and the rounded weight; only the weight loses
    precision. One scale for each token would not do: the largest inputs are far larger than the
    others, and int8 would round most of them to zero.
    """

    def leaves(self, matrix: Matrix) -> dict[str, ArraySpec]:
        """See `WeightFormat`."""
        return {
            "weight": ArraySpec(matrix.axes, "int8"),
            "scale": ArraySpec(matrix.outputs, "float32"),
        }

    def encode(self, weight: np.ndarray, matrix: Matrix) -> dict[str, np.ndarray]:
        """See `WeightFormat`. The largest value of each output becomes 127."""
        num_outputs = math.prod(size for _, size in matrix.outputs)
        values = np.empty(weight.shape, np.int8)
        scale = np.empty(num_outputs, np.float32)
        shape = (num_outputs, -1) if matrix.outputs_first else (-1, num_outputs)
        axis = 1 if matrix.outputs_first else 0
        # In parts: a float32 copy of a whole embedding would be four times as large as the result.
        step = max(1, CHUNK_ELEMENTS * num_outputs // weight.size)
        for start in range(0, num_outputs, step):
            part = slice(start, start + step)
            where = (part, slice(None)) if matrix.outputs_first else (slice(None), part)
            floats = weight.reshape(shape)[where].astype(np.float32)
            largest = np.abs(floats).max(axis, keepdims=True)
            if not np.isfinite(largest).all():
                raise CheckpointError("the weight has values that are not finite")
            factor = np.maximum(largest / 127, SMALLEST_SCALE)
            scale[part] = factor.reshape(-1)
            values.reshape(shape)[where] = np.rint(floats / factor)
        return {
            "weight": values,
            "scale": scale.reshape([size for _, size in matrix.outputs]),
        }

    def matmul(
        self,
        x: Float[Array, "tokens in"],
        leaves: Leaves,
        *,
        outputs_first: bool = False,
        dtype: str | None = None,
    ) -> Float[Array, "tokens out"]:
        """See `WeightFormat`."""
        weight = as_matrix(leaves["weight"], x.shape[1], outputs_first=outputs_first)
        scale = leaves["scale"].reshape(-1)

        def on_cpu(x: Array, weight: Array, scale: Array) -> Array:
            # Without barriers, XLA computes the slice of the scale again for each value, and the
            # scaling again for each use, in the loops around them: a fifth of a large step.
            scale = lax.optimization_barrier(scale)
            if x.shape[0] > MAX_ROWS_OF_TWO_TERMS:
                y = _widened(x, weight, outputs_first=outputs_first)
            else:
                y = _two_terms(x, weight, outputs_first=outputs_first)
            return lax.optimization_barrier((y * scale).astype(dtype or x.dtype))

        def elsewhere(x: Array, weight: Array, scale: Array) -> Array:
            y = _widened(x, weight, outputs_first=outputs_first)
            return (y * scale).astype(dtype or x.dtype)

        return lax.platform_dependent(x, weight, scale, cpu=on_cpu, default=elsewhere)

    def rows(
        self, tokens: Int32[Array, " tokens"], leaves: Leaves, *, dtype: str
    ) -> Float[Array, "tokens in"]:
        """See `WeightFormat`."""
        values = leaves["weight"][tokens].astype(jnp.float32)
        return (values * leaves["scale"][tokens][:, None]).astype(dtype)


def _widened(
    x: Float[Array, "tokens in"], weight: Int8Array[Array, "a b"], *, outputs_first: bool
) -> Float32[Array, "tokens out"]:
    """Returns the product of x and integers.

    A GPU converts the weight inside of the product, a CPU before it. Nothing is rounded.
    """
    return product(x, weight.astype(x.dtype), outputs_first=outputs_first, dtype="float32")


def _two_terms(
    x: Float[Array, "tokens in"], weight: Int8Array[Array, "a b"], *, outputs_first: bool
) -> Float32[Array, "tokens out"]:
    """Returns the product of x and integers; x is rounded to 15 bits of its largest value a token.

    Two integers of 8 bits stand for each value of x: x = (high + low / 254) * step. One product of
    2 T rows reads the weight once, and for few rows that is all that it costs.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    step = jnp.where(largest == 0, 1, largest) / 127  # NaN stays NaN, and so does the result
    scaled = x / step
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * 254)
    terms = jnp.concatenate((high, low)).astype(jnp.int8)
    sums = product(terms, weight, outputs_first=outputs_first, dtype="int32")
    of_high, of_low = jnp.split(sums.astype(jnp.float32), 2)
    return (of_high + of_low / 254) * step

"""The weights of linear layers: their logical axes, and the formats that store them.

A format decides which arrays stand for a weight, makes them when the weight is loaded, and
multiplies by them. `FORMATS` has one entry for each; `models.blocks` calls them and knows none.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Num

Axes = tuple[tuple[str, int], ...]
"""The name and size of each axis of an array. Axes of one name are cut alike across devices."""

MODEL_AXIS = "model"
"""The axis of a mesh of devices that a model is cut across."""

Leaves = Mapping[str, Array]
"""The arrays that stand for a weight, by name."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to be loaded.

    Attributes:
      axes: the name and size of each axis.
      dtype: a numpy name; None: the dtype of the model, see `models.layout.Layout`.
    """

    axes: Axes
    dtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each axis."""
        return tuple(name for name, _ in self.axes)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The logical axes of a weight, which maps inputs to outputs.

    A weight is multiplied as a matrix [I, O], where I and O are the products of the sizes. The
    arrays keep the single axes: heads and columns of the MLP can be cut across devices there.

    Attributes:
      inputs: the axes that the product sums over; none for the bias and the weight of a norm.
      outputs: the axes of the result.
      outputs_first: stored as [*outputs, *inputs], not [*inputs, *outputs]; so are tables of
        vectors.
    """

    inputs: Axes
    outputs: Axes
    outputs_first: bool = False

    @property
    def axes(self) -> Axes:
        """The axes in the order in which they are stored."""
        return self.outputs + self.inputs if self.outputs_first else self.inputs + self.outputs

    @property
    def num_rows(self) -> int:
        """The number of leading axes that are the rows of the stored matrix."""
        return len(self.outputs if self.outputs_first else self.inputs)


@runtime_checkable
class WeightFormat(Protocol):
    """A way to store weights and to multiply by them. All instances of an implementation are equal.

    Methods take the leaves of one layer, without the axis of `Layout.loop` "scan". Inside a program
    that is cut across devices, leaves and inputs are the parts of one device.
    """

    def leaves(self, matrix: Matrix) -> dict[str, ArraySpec]:
        """Returns the arrays that stand for a weight. The names become attributes of its module."""
        ...

    def encode(self, weight: np.ndarray, matrix: Matrix) -> dict[str, np.ndarray]:
        """Returns the values of `leaves` for a weight with the axes ``matrix.axes``.

        Runs on the host. ``weight`` has the dtype of the model and may be one of the results.

        Raises:
          CheckpointError: the format cannot represent the values.
        """
        ...

    def matmul(
        self,
        x: Float[Array, "tokens in"],
        leaves: Leaves,
        *,
        outputs_first: bool = False,
        dtype: str | None = None,
    ) -> Float[Array, "tokens out"]:
        """Returns the product [T, O] of inputs [T, I] and a weight.

        Args:
          x: the inputs, in the dtype of the model.
          leaves: the arrays of the weight.
          outputs_first: see `Matrix`.
          dtype: dtype of the result, a numpy name; None: that of ``x``.
        """
        ...

    def rows(
        self, tokens: Int32[Array, " tokens"], leaves: Leaves, *, dtype: str
    ) -> Float[Array, "tokens in"]:
        """Returns the vectors [T, I] of the outputs i32[T]; the weight is stored outputs first."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """The weight itself, in the dtype of the model."""

    def leaves(self, matrix: Matrix) -> dict[str, ArraySpec]:
        """See `WeightFormat`."""
        return {"weight": ArraySpec(matrix.axes)}

    def encode(self, weight: np.ndarray, matrix: Matrix) -> dict[str, np.ndarray]:
        """See `WeightFormat`."""
        return {"weight": weight}

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
        return product(x, weight, outputs_first=outputs_first, dtype=dtype or x.dtype)

    def rows(
        self, tokens: Int32[Array, " tokens"], leaves: Leaves, *, dtype: str
    ) -> Float[Array, "tokens in"]:
        """See `WeightFormat`."""
        return leaves["weight"][tokens]


FORMATS: dict[str, str] = {
    "dense": "jaxserve.ops.linear:Dense",
    "int8": "jaxserve.ops.int8:Int8",
}
"""The formats by name, the values of ``--quantization``; ``module:Class``, imported when used."""


def weight_format(name: str) -> WeightFormat:
    """Returns a format of `FORMATS`. Raises KeyError."""
    module, class_name = FORMATS[name].split(":")
    return getattr(importlib.import_module(module), class_name)()


def product(
    x: Num[Array, "tokens in"],
    weight: Num[Array, "a b"],
    *,
    outputs_first: bool,
    dtype: str | jnp.dtype,
) -> Num[Array, "tokens out"]:
    """Returns ``x @ weight``, or ``x @ weight.T`` if outputs are first, in ``dtype``."""
    contract = (((1,), (1 if outputs_first else 0,)), ((), ()))
    return lax.dot_general(x, weight, contract, preferred_element_type=jnp.dtype(dtype))


def as_matrix(array: Array, num_inputs: int, *, outputs_first: bool) -> Array:
    """Returns an array with the axes of a `Matrix` as [O, I] if outputs are first, else [I, O]."""
    num_outputs = math.prod(array.shape) // num_inputs
    shape = (num_outputs, num_inputs) if outputs_first else (num_inputs, num_outputs)
    return array.reshape(shape)

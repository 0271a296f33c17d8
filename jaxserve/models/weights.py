"""The weights of a model before they are loaded: their axes, their parts and their format."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxserve.ops.linear import ArraySpec, Axes, Dense, Matrix, WeightFormat


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a fused parameter, each of which is a tensor of its own in checkpoints.

    Attributes:
      axis: the name of the axis along which the parts lie.
      sizes: name and size of each part on that axis.
    """

    axis: str
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter as checkpoints store it, and the format that makes its arrays.

    Attributes:
      name: the attribute that the rules of a family name as the target.
      matrix: the axes of the parameter before it is encoded.
      parts: the parts of a fused parameter.
      format: makes the arrays; None: the parameter is one array.
    """

    name: str
    matrix: Matrix
    parts: Parts | None
    format: WeightFormat | None = None


def parameter(axes: Axes, *, parts: Parts | None = None, name: str = "weight") -> nnx.Param:
    """Returns a parameter to be loaded that has no format, such as a bias; it is an `ArraySpec`.

    Args:
      axes: the logical axes. Checkpoints store a vector, with all of them as one.
      parts: for a fused parameter.
      name: the attribute that will hold the parameter.
    """
    return nnx.Param(ArraySpec(axes), source=Source(name, Matrix((), axes), parts))


class Weight(nnx.Module):
    """A module that has a weight in any format, the base of `Linear` and `Embed`.

    The arrays of the format are attributes of the module, parameters without values, to be loaded.
    The format is `Dense`, and no axis is cut, until `store_weights_as` and `cut_weights` change it.

    Args:
      matrix: the axes of the weight.
      parts: for a fused weight.
    """

    def __init__(self, matrix: Matrix, parts: Parts | None = None) -> None:
        self.matrix = matrix
        self.parts = parts
        self.cut: tuple[str, ...] = ()
        self._declare(Dense())

    def store_as(self, weight_format: WeightFormat) -> None:
        """Replaces the parameters of the weight by those of a format."""
        for name in self.format.leaves(self.matrix):
            delattr(self, name)
        self._declare(weight_format)

    def _declare(self, weight_format: WeightFormat) -> None:
        self.format = weight_format
        source = Source("weight", self.matrix, self.parts, weight_format)
        for name, array in weight_format.leaves(self.matrix).items():
            setattr(self, name, nnx.Param(array, source=source))

    @property
    def leaves(self) -> dict[str, jax.Array]:
        """The arrays of the weight."""
        return {name: getattr(self, name)[...] for name in self.format.leaves(self.matrix)}

    def is_cut(self, axes: Axes) -> bool:
        """Returns whether each device has only a part of one of these axes of the weight."""
        return any(name in self.cut for name, _ in axes)


def store_weights_as(module: nnx.Module, weight_format: WeightFormat) -> None:
    """Chooses the format of every weight in a module, before its values are loaded."""
    for _, each in nnx.iter_modules(module):
        if isinstance(each, Weight):
            each.store_as(weight_format)


def cut_weights(module: nnx.Module, cut: tuple[str, ...]) -> None:
    """Tells every weight in a module which axes are cut across devices; see `Layout.cut`."""
    for _, each in nnx.iter_modules(module):
        if isinstance(each, Weight):
            each.cut = cut

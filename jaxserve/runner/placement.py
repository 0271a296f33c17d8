"""Places the arrays of an engine on its devices, and runs programs on all of them.

With tensor parallelism every device has a part of each layer: some of the key-value heads with
their queries, some columns of the MLP, and some tokens of the vocabulary. The KV cache is cut by
key-value heads too. Everything else is on all devices: what a step reads and returns, and norms.
The devices run the same program, which adds up their results twice in each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.ops.linear import MODEL_AXIS, ArraySpec

F = TypeVar("F", bound=Callable[..., Any])

WHOLE = PartitionSpec()
"""The spec of an array that every device has as a whole."""

REQUIRED = {"kv_heads": "key-value heads", "mlp": "columns of the MLP"}
"""Axes that are cut whenever there are several devices, and what they are for the user."""

OPTIONAL = ("vocab",)
"""Axes that are cut if the number of devices divides their size."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where arrays are: on the default device of jax, or on all devices of a mesh.

    Attributes:
      mesh: the devices, along `MODEL_AXIS`; None: one device, on which no array and no program is
        changed.
      cut: names of the axes that are cut across the devices.
    """

    mesh: Mesh | None = None
    cut: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    def spec(self, names: Sequence[str]) -> PartitionSpec:
        """Returns how an array whose axes have these names is cut."""
        axes = [MODEL_AXIS if name in self.cut else None for name in names]
        # Without trailing None, as jax writes the shardings of results: it compares them literally.
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

    def sharding(self, names: Sequence[str] = ()) -> NamedSharding | None:
        """Returns the placement of an array whose axes have these names; by default a whole one.

        None, for one device, means the default device to `jax.device_put` and `jax.numpy`.
        """
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec(names))

    def on_each_device(self, function: F, *, in_specs: Any, out_specs: Any) -> F:
        """Returns a function that runs on the parts that each device has of its arguments.

        With one device, it is the function itself.

        Args:
          function: its results must be equal on all devices where ``out_specs`` has `WHOLE`.
          in_specs: for each argument a spec, for all its arrays, or a tree of specs.
          out_specs: the same for the results.
        """
        if self.mesh is None:
            return function
        # The check of the results cannot see through Pallas kernels.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


ONE_DEVICE = Placement()


def specs(tree: Any) -> Any:
    """Returns the PartitionSpec of each array of a pytree that a `Placement` placed."""

    def spec(array: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
        placed = array.sharding
        return placed.spec if isinstance(placed, NamedSharding) else WHOLE

    return jax.tree.map(spec, tree)


def place(devices: Sequence[Any], arrays: Any) -> Placement:
    """Decides how a model is cut across devices.

    Args:
      devices: one device of jax or several.
      arrays: the parameters of the model, a pytree with an `ArraySpec` for each array.

    Raises:
      ConfigError: the number of devices does not divide a size that must be cut.
    """
    count = len(devices)
    if count == 1:
        return ONE_DEVICE
    leaves: list[ArraySpec] = jax.tree.leaves(arrays)
    axes = {axis for array in leaves for axis in array.axes}
    for name, size in sorted(axes):
        if name in REQUIRED and size % count:
            raise ConfigError(
                f"--tensor-parallel-size must divide the {size} {REQUIRED[name]} of this model, "
                f"got {count}"
            )
    optional = [
        name for name in OPTIONAL if not any(n == name and size % count for n, size in axes)
    ]
    return Placement(Mesh(np.array(devices), (MODEL_AXIS,)), (*REQUIRED, *optional))


def parts_on_each_device(tree: Any) -> Any:
    """Returns the ShapeDtypeStruct of the part that each device has of each array of a pytree."""

    def part(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        placed = array.sharding
        shape = array.shape if placed is None else placed.shard_shape(array.shape)
        return jax.ShapeDtypeStruct(shape, array.dtype)

    return jax.tree.map(part, tree)


def bytes_on_each_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a pytree take on each of their devices."""
    parts = jax.tree.leaves(parts_on_each_device(tree))
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)

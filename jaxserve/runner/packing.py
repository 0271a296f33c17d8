"""Many small arrays in one buffer, so that a step needs one transfer to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """The arrays of a pytree, all of 32 bit types, end to end.

    Attributes:
      buffer: i32[N]; on the host as made by `pack`, on the device inside a jitted function.
      tree: static, the structure of the pytree with its static fields.
      arrays: static, shape and dtype name of each array.
    """

    buffer: jax.Array | np.ndarray
    tree: Any = field(metadata={"static": True})
    arrays: tuple[tuple[tuple[int, ...], str], ...] = field(metadata={"static": True})

    def unpack(self) -> Any:
        """The pytree, with jax arrays; for use inside a jitted function."""
        leaves, start = [], 0
        for shape, dtype in self.arrays:
            end = start + prod(shape)
            piece = lax.slice(self.buffer, (start,), (end,)).reshape(shape)
            leaves.append(lax.bitcast_convert_type(piece, np.dtype(dtype)))
            start = end
        return jax.tree.unflatten(self.tree, leaves)


def pack(tree: Any) -> Packed:
    """Packs a pytree of numpy arrays; every dtype must have 32 bits."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
    buffer = np.concatenate([np.ravel(leaf).view(np.int32) for leaf in leaves])
    return Packed(buffer, structure, arrays)

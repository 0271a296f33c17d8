"""The type of array fields in pytrees, for annotations such as ``Int32[Leaf, " tokens"]``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array as Leaf
else:
    # The leaves may also be numpy arrays, or jax.ShapeDtypeStruct while jax looks at shapes only.
    # Run-time checks therefore test the shape and the dtype, not the array type.
    Leaf = Any

__all__ = ["Leaf"]

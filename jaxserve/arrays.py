"""The array type of the fields of pytrees, for annotations such as ``Int32[Leaf, " tokens"]``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array as Leaf
else:
    # A pytree is also made of numpy arrays on the host and of jax.ShapeDtypeStruct while jax looks
    # at shapes only. Checks at run time therefore ask for a shape and a dtype and no array type.
    Leaf = Any

__all__ = ["Leaf"]

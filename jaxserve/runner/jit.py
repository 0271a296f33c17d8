"""Calls jitted functions with few transfers to the device, and records every compilation.

This is the only module that uses a private interface of jax, in `num_programs`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Int32

from jaxserve.arrays import Leaf

logger = logging.getLogger("jaxserve")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """The arrays of a pytree, all of 32-bit dtypes, end to end in one buffer.

    A step has many small inputs, which one buffer moves to the device in one transfer.

    Attributes:
      buffer: i32[N], a numpy array as made by `pack`, a jax array inside a jitted function.
      tree: static, the structure of the pytree with its static fields.
      arrays: static, shape and dtype name of each array.
    """

    buffer: Int32[Leaf | np.ndarray, " n"]
    tree: Any = field(metadata={"static": True})
    arrays: tuple[tuple[tuple[int, ...], str], ...] = field(metadata={"static": True})

    def unpack(self) -> Any:
        """Returns the pytree, with jax arrays. For use inside a jitted function."""
        leaves, start = [], 0
        for shape, dtype in self.arrays:
            end = start + prod(shape)
            part = lax.slice(self.buffer, (start,), (end,)).reshape(shape)
            leaves.append(lax.bitcast_convert_type(part, np.dtype(dtype)))
            start = end
        return jax.tree.unflatten(self.tree, leaves)

    def replaced(self, tree: Any) -> Packed:
        """Packs other arrays of the same shapes and dtypes. For use inside a jitted function."""
        leaves, structure = jax.tree.flatten(tree)
        assert structure == self.tree
        flat = [lax.bitcast_convert_type(leaf.reshape(-1), np.dtype("int32")) for leaf in leaves]
        return replace(self, buffer=lax.concatenate(flat, 0))


def pack(tree: Any) -> Packed:
    """Copies a pytree of numpy arrays into one buffer. Every dtype must have 32 bits."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
    buffer = np.concatenate([np.ravel(leaf).view(np.int32) for leaf in leaves])
    return Packed(buffer, structure, arrays)


class CompilationLog:
    """The programs that were compiled, or loaded from the compilation cache, since the start.

    A compilation outside `expected` holds up every running request, so it is logged as a warning.
    """

    def __init__(self) -> None:
        self.programs: list[str] = []
        self._is_expected = False

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Turns the warnings off, for compilations while no request is running."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def note(self, program: str, seconds: float) -> None:
        """Adds a program and the time that its compilation took."""
        self.programs.append(program)
        if not self._is_expected:
            logger.warning("compiled during a request (%.1f s): %s", seconds, program)


class Program:
    """A jitted function whose compilations are logged.

    Args:
      name: describes the function in the log.
      jitted: made by jax.jit.
      log: receives the compilations.
    """

    def __init__(self, name: str, jitted: Any, log: CompilationLog) -> None:
        self._name = name
        self._jitted = jitted
        self._log = log

    def __call__(self, *args: Any, shapes: object, **static: Any) -> Any:
        """Calls the function. ``shapes`` describes the arguments in the log."""
        before, start = num_programs(self._jitted), time.perf_counter()
        result = self._jitted(*args, **static)
        if num_programs(self._jitted) > before:
            self._log.note(f"{self._name}: {shapes}", time.perf_counter() - start)
        return result


def num_programs(jitted: Any) -> int:
    """Returns the number of programs that jax has compiled for a function.

    Each combination of shapes and static arguments is one program. jax has no public interface for
    this. pyproject.toml bounds the version of jax, and tests/runner/test_jit.py fails when the
    private interface changes.
    """
    return jitted._cache_size()

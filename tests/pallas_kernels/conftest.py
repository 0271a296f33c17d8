"""Random attention problems, see `pallas_kernels.problems`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from pallas_kernels import problems


@pytest.fixture(autouse=True)
def compile_quickly() -> Iterator[None]:
    """Interpreted kernels are large programs that run once: compiling them is most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def make_problem(rng: np.random.Generator) -> Callable[[problems.Shape], problems.Problem]:
    """Draws a problem of a shape."""
    return lambda shape: problems.make_problem(rng, shape)


@pytest.fixture
def shape() -> type[problems.Shape]:
    """The class of shapes."""
    return problems.Shape

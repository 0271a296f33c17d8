"""Random attention problems (`pallas_kernels.testing.problems`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from pallas_kernels.testing import problems


@pytest.fixture(autouse=True)
def compile_quickly() -> Iterator[None]:
    """Turns optimizations off: interpreted kernels are large, run once, and compile slowly."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def make_problem(rng: np.random.Generator) -> Callable[[problems.Shape], problems.Problem]:
    """Returns a function that draws a problem of a shape."""
    return lambda shape: problems.make_problem(rng, shape)


@pytest.fixture
def shape() -> type[problems.Shape]:
    return problems.Shape

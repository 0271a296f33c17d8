"""Random attention problems (`pallas_kernels.testing.problems`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pallas_kernels.testing import problems


@pytest.fixture(autouse=True)
def _compile_kernels_quickly(compile_quickly: None) -> None:
    """Interpreted kernels are large programs that run once."""


@pytest.fixture
def make_problem(rng: np.random.Generator) -> Callable[[problems.Shape], problems.Problem]:
    """Returns a function that draws a problem of a shape."""
    return lambda shape: problems.make_problem(rng, shape)


@pytest.fixture
def shape() -> type[problems.Shape]:
    return problems.Shape

"""Activations against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.ops.activation import ACTIVATIONS
from jaxserve.testing.tolerance import rounding

ERF = np.vectorize(math.erf)
DEFINITIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + ERF(x / 2**0.5)),
    "gelu_new": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}
DEFINITIONS["gelu_pytorch_tanh"] = DEFINITIONS["gelu_new"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_definition(name: str):
    x = np.linspace(-6, 6, 200, dtype=np.float32)
    got = np.asarray(ACTIVATIONS[name](x))
    # A polynomial of degree three, a function such as tanh, and a product: ten roundings.
    atol = rounding("float32", 10, scale=6)
    np.testing.assert_allclose(got, DEFINITIONS[name](x.astype(np.float64)), rtol=0, atol=atol)

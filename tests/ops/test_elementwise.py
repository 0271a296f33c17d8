"""Activations and RMS normalisation, compared with float64."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.elementwise import ACTIVATIONS, rms_norm
from jaxserve.testing.tolerance import rounding, unit

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
def test_an_activation_equals_its_definition(name: str):
    x = np.linspace(-6, 6, 200, dtype=np.float32)
    got = np.asarray(ACTIVATIONS[name](x))
    # A polynomial of degree three, a function such as tanh, and a product: ten roundings.
    atol = rounding("float32", 10, scale=6)
    np.testing.assert_allclose(got, DEFINITIONS[name](x.astype(np.float64)), rtol=0, atol=atol)


STEPS = 4
"""The number of roundings of a norm after its sum: the mean, the root and two products."""


def reference(x, weight, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def test_rms_norm_equals_float64(rng: np.random.Generator):
    x = rng.standard_normal((7, 3, 576)).astype(np.float32) * 10
    weight = rng.standard_normal(576).astype(np.float32)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-5))
    np.testing.assert_allclose(
        got, reference(x, weight, 1e-5), rtol=rounding("float32", 576 + STEPS)
    )


def test_rms_norm_adds_eps_and_keeps_zeros(rng: np.random.Generator):
    x = np.stack([np.zeros(64), rng.standard_normal(64) * 1e-3]).astype(np.float32)
    weight = np.ones(64, np.float32)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-5))
    np.testing.assert_allclose(
        got, reference(x, weight, 1e-5), rtol=rounding("float32", 64 + STEPS)
    )


def test_rms_norm_of_half_precision_squares_in_float32():
    x = np.full((1, 64), 400, np.float16)  # 400 ** 2 is beyond float16
    got = rms_norm(jnp.asarray(x), jnp.ones(64, jnp.float16), eps=1e-5)
    assert got.dtype == np.float16
    np.testing.assert_allclose(np.asarray(got), 1.0, rtol=2 * unit("float16"))

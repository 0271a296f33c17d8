"""The fused addition and norm against numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.testing.tolerance import rounding, unit
from pallas_kernels import reference
from pallas_kernels.add_rms_norm import MAX_SIZE, add_rms_norm

EPS = 1e-5


@pytest.mark.parametrize("function", [add_rms_norm, reference.add_rms_norm])
@pytest.mark.parametrize(
    ("size", "dtype"), [(576, "bfloat16"), (1024, "float32"), (1, "float32"), (2560, "float16")]
)
def test_it_adds_and_normalises(function, size, dtype, rng):
    x, residual = rng.standard_normal((2, 5, size)).astype(jnp.dtype(dtype))
    x, residual = x * rng.choice([1e-4, 1.0, 30.0], (5, 1)).astype(x.dtype), residual
    x[0], residual[0] = 0.0, 0.0
    weight = rng.standard_normal(size).astype(x.dtype)
    options = {"interpret": True} if function is add_rms_norm else {}
    out, total = function(x, residual, weight, eps=EPS, **options)
    np.testing.assert_array_equal(np.asarray(total), x + residual)
    h = (x + residual).astype(np.float64)
    right = h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)
    assert out.dtype == total.dtype == x.dtype
    # The norm and its product with the weight are rounded. The root halves the error of the sum.
    rtol = 2 * unit(dtype) + rounding("float32", size + 4) / 2
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), right, rtol=rtol, atol=2 * smallest
    )


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        ((2, 8), (1, 8), (8,), r"residual must have shape \(2, 8\), got \(1, 8\)"),
        ((2, 8), (2, 8), (4,), r"weight must have shape \(8,\), got \(4,\)"),
        ((1, MAX_SIZE + 1), (1, 1), (1,), "rows of up to 16384 elements are supported, got 16385"),
    ],
)
def test_shapes_that_do_not_fit_are_named(x, residual, weight, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(jnp.zeros(x), jnp.zeros(residual), jnp.zeros(weight), eps=EPS, interpret=True)


def test_dtypes_that_do_not_fit_are_named():
    ints = jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="dtype of x int32 is not supported: expected one of bf"):
        add_rms_norm(ints, ints, jnp.ones(8), eps=EPS, interpret=True)
    floats = ints.astype(jnp.float32)
    with pytest.raises(ValueError, match="residual is bfloat16, x is float32"):
        add_rms_norm(floats, floats.astype(jnp.bfloat16), jnp.ones(8), eps=EPS, interpret=True)

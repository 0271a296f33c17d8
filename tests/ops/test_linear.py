"""Formats of weights: their arrays, and products compared with float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.ops import int8
from jaxserve.ops.linear import FORMATS, Matrix, weight_format
from jaxserve.testing.tolerance import rounding, unit

INPUTS = (("embed", 96),)
OUTPUTS = (("kv_heads", 2), ("qkv", 3), ("head_dim", 8))
MATRICES = {
    "inputs first": Matrix(INPUTS, OUTPUTS),
    "outputs first": Matrix(INPUTS, OUTPUTS, outputs_first=True),
}
NUM_INPUTS, NUM_OUTPUTS = 96, 48


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=MATRICES)
def matrix(request: pytest.FixtureRequest) -> Matrix:
    return MATRICES[request.param]


def random_weight(matrix: Matrix, rng: np.random.Generator, dtype: str = "float32") -> np.ndarray:
    """Outputs of very different sizes, one of them zero."""
    weight = rng.standard_normal((NUM_INPUTS, NUM_OUTPUTS)) * rng.lognormal(0, 2, NUM_OUTPUTS)
    weight[:, 5] = 0
    stored = weight.T if matrix.outputs_first else weight
    return stored.reshape([size for _, size in matrix.axes]).astype(jnp.dtype(dtype))


def decoded(name: str, arrays: dict[str, np.ndarray], matrix: Matrix) -> np.ndarray:
    """Returns the weight f64[I, O] that the arrays of a format stand for."""
    weight = arrays["weight"].astype(np.float64)
    if name == "int8":
        scale = arrays["scale"].reshape(*arrays["scale"].shape, *[1] * len(INPUTS))
        weight *= scale if matrix.outputs_first else arrays["scale"]
    rows = weight.reshape(NUM_OUTPUTS if matrix.outputs_first else NUM_INPUTS, -1)
    return rows.T if matrix.outputs_first else rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoded_arrays_are_those_that_the_format_declares(name, matrix, dtype, rng):
    arrays = weight_format(name).encode(random_weight(matrix, rng, dtype), matrix)
    declared = {
        leaf: (spec.shape, spec.dtype or dtype)
        for leaf, spec in weight_format(name).leaves(matrix).items()
    }
    assert {leaf: (array.shape, array.dtype.name) for leaf, array in arrays.items()} == declared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 16, 64, 65, 200])
def test_products_equal_those_of_float64(name, matrix, dtype, rows, rng):
    """The result is the product with the weight as stored; some inputs are far larger."""
    arrays = weight_format(name).encode(random_weight(matrix, rng, dtype), matrix)
    x = rng.standard_normal((rows, NUM_INPUTS))
    x[:, ::17] *= 200
    x = x.astype(jnp.dtype(dtype))
    weight = decoded(name, arrays, matrix)
    expected = x.astype(np.float64) @ weight
    matmul = jax.jit(weight_format(name).matmul, static_argnames=("outputs_first", "dtype"))
    leaves = {leaf: jnp.asarray(array) for leaf, array in arrays.items()}
    for result in ("float32", None):
        found = matmul(jnp.asarray(x), leaves, outputs_first=matrix.outputs_first, dtype=result)
        assert found.dtype == (result or dtype)
        size = np.abs(x.astype(np.float64)) @ np.abs(weight)
        bound = rounding("float32", NUM_INPUTS, scale=1) * size
        if name == "int8":  # half a step of the low term, for each input
            half = np.abs(x.astype(np.float64)).max(1, keepdims=True) / 127 / 254 / 2
            bound += 1.01 * half * np.abs(weight).sum(0)
        bound += 1.01 * unit(found.dtype) * np.abs(expected)
        assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()


def test_vectors_of_outputs_are_rows_of_the_stored_weight(name, rng):
    matrix = Matrix((("embed", 96),), (("vocab", 48),), outputs_first=True)
    arrays = weight_format(name).encode(random_weight(matrix, rng), matrix)
    tokens = rng.integers(0, 48, 7).astype(np.int32)
    leaves = {leaf: jnp.asarray(array) for leaf, array in arrays.items()}
    found = weight_format(name).rows(jnp.asarray(tokens), leaves, dtype="float32")
    assert found.dtype == jnp.float32
    want = decoded(name, arrays, matrix).T[tokens]
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_int8_rounds_each_weight_to_the_nearest_of_255_values(matrix, rng):
    weight = random_weight(matrix, rng)
    arrays = weight_format("int8").encode(weight, matrix)
    exact = decoded("dense", {"weight": weight}, matrix)
    largest = np.abs(exact).max(0)
    error = np.abs(decoded("int8", arrays, matrix) - exact).max(0)
    assert (error <= 1.0001 * largest / 254).all()
    assert np.abs(arrays["weight"]).max() == 127
    assert error.max() > 0


def test_int8_quantises_large_weights_in_parts(matrix, rng, monkeypatch):
    weight = random_weight(matrix, rng)
    whole = int8.Int8().encode(weight, matrix)
    monkeypatch.setattr(int8, "CHUNK_ELEMENTS", 7 * NUM_INPUTS)  # the last part is smaller
    for leaf, array in int8.Int8().encode(weight, matrix).items():
        np.testing.assert_array_equal(array, whole[leaf])


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-43, 1e-40, 1e-37, 1e-30])
def test_int8_has_no_scale_that_devices_take_for_zero(matrix, rng, largest):
    """The smallest weights become zero, and all others are rounded as usual."""
    weight = rng.uniform(-1, 1, (NUM_INPUTS, NUM_OUTPUTS))
    weight *= largest / np.abs(weight).max(0)
    stored = (weight.T if matrix.outputs_first else weight).astype(np.float32)
    arrays = int8.Int8().encode(stored.reshape([size for _, size in matrix.axes]), matrix)
    tiny = np.finfo(np.float32).tiny
    assert arrays["scale"].min() >= tiny
    error = np.abs(decoded("int8", arrays, matrix) - weight).max()
    assert error <= 0.51 * max(largest / 127, tiny)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_int8_refuses_weights_that_are_not_finite(matrix, rng, value):
    weight = random_weight(matrix, rng)
    weight[(1,) * weight.ndim] = value
    with pytest.raises(CheckpointError, match="not finite"):
        weight_format("int8").encode(weight, matrix)


@pytest.mark.parametrize("rows", [4, 100])
def test_a_token_does_not_change_the_products_of_others(name, matrix, rows, rng):
    """Not even a token whose hidden state is NaN, nor one that is zero."""
    arrays = weight_format(name).encode(random_weight(matrix, rng), matrix)
    leaves = {leaf: jnp.asarray(array) for leaf, array in arrays.items()}
    x = rng.standard_normal((rows, NUM_INPUTS)).astype(np.float32)
    odd = x.copy()
    odd[1], odd[2] = np.nan, 0
    first, second = (
        np.asarray(weight_format(name).matmul(value, leaves, outputs_first=matrix.outputs_first))
        for value in map(jnp.asarray, (x, odd))
    )
    np.testing.assert_array_equal(np.delete(first, [1, 2], 0), np.delete(second, [1, 2], 0))
    assert np.isnan(second[1]).all()
    assert (second[2] == 0).all()


def test_parts_of_two_devices_make_up_the_product(name, rng):
    """Cut along the outputs, the results lie side by side; along the inputs, they are added."""
    matrix = MATRICES["inputs first"]
    arrays = weight_format(name).encode(random_weight(matrix, rng), matrix)
    x = jnp.asarray(rng.standard_normal((6, NUM_INPUTS)), jnp.float32)
    specs = weight_format(name).leaves(matrix)
    multiply = weight_format(name).matmul

    def half(axis: str, which: int) -> dict[str, jax.Array]:
        return {
            leaf: jnp.split(array, 2, axis=specs[leaf].names.index(axis))[which]
            if axis in specs[leaf].names
            else jnp.asarray(array)
            for leaf, array in arrays.items()
        }

    whole = multiply(x, {leaf: jnp.asarray(array) for leaf, array in arrays.items()})
    atol = 0.01 * float(jnp.abs(whole).max())
    side_by_side = jnp.concatenate([multiply(x, half("kv_heads", i)) for i in (0, 1)], axis=1)
    np.testing.assert_allclose(side_by_side, whole, atol=atol)
    parts = jnp.split(x, 2, axis=1)
    added = multiply(parts[0], half("embed", 0)) + multiply(parts[1], half("embed", 1))
    np.testing.assert_allclose(added, whole, atol=atol)

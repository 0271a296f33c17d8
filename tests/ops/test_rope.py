"""Rotary embedding, compared with its formula in float64, and the scalings of its frequencies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    cos_sin,
    fixed_frequencies,
    rotate,
)
from jaxserve.testing.tolerance import rounding, unit

HEAD_DIM = 64
THETA = 10000.0
PLAIN = THETA ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
FREQUENCY_ERROR = 10 * unit("float32")
"""The relative error of a frequency: a power is right to four units in the last place, which are
eight roundings, and there are two divisions. The relative error of an angle is the same."""


def angles(positions, rope: Rope) -> np.ndarray:
    cos, sin = cos_sin(jnp.asarray(positions, jnp.int32), rope)
    return np.arctan2(sin, cos)


def test_rotation_is_a_complex_product(rng: np.random.Generator):
    x = rng.standard_normal((5, 3, HEAD_DIM)).astype(np.float32)
    positions = rng.integers(0, 1000, 5).astype(np.int32)
    cos, sin = cos_sin(jnp.asarray(positions), Rope(THETA, HEAD_DIM))
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    pairs = x[..., :32] + 1j * x[..., 32:]
    rotated = pairs * np.exp(1j * positions[:, None, None] * PLAIN)
    # An angle is a position times a frequency, both rounded; its error rotates the largest pair.
    atol = rounding("float32", 2, scale=positions.max() * np.abs(pairs).max())
    np.testing.assert_allclose(got[..., :32], rotated.real, rtol=0, atol=atol)
    np.testing.assert_allclose(got[..., 32:], rotated.imag, rtol=0, atol=atol)


def test_rotation_keeps_the_dtype_and_computes_in_float32(rng: np.random.Generator):
    x = rng.standard_normal((2, 1, HEAD_DIM)).astype(np.float16)
    cos, sin = cos_sin(jnp.array([3, 70], jnp.int32), Rope(THETA, HEAD_DIM))
    got = rotate(jnp.asarray(x), cos, sin)
    assert got.dtype == np.float16
    want = rotate(jnp.asarray(x, jnp.float32), cos, sin)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want).astype(np.float16))


def test_frequencies_without_scaling_follow_theta():
    np.testing.assert_allclose(
        fixed_frequencies(Rope(THETA, HEAD_DIM)), PLAIN, rtol=FREQUENCY_ERROR
    )


def test_linear_scaling_divides_all_frequencies():
    scaled = fixed_frequencies(Rope(THETA, HEAD_DIM, LinearScaling(4.0)))
    np.testing.assert_allclose(scaled, PLAIN / 4, rtol=FREQUENCY_ERROR)


def test_factor_scaling_divides_each_frequency():
    factors = np.linspace(1, 3, HEAD_DIM // 2)
    scaled = fixed_frequencies(Rope(THETA, HEAD_DIM, FactorScaling(tuple(factors))))
    np.testing.assert_allclose(scaled, PLAIN / factors, rtol=FREQUENCY_ERROR)


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0, 1.0, 4.0, 512), YarnScaling(8.0, 512, 1.0)])
def test_llama3_and_yarn_keep_high_frequencies_and_divide_low_frequencies(scaling):
    ratio = PLAIN / fixed_frequencies(Rope(THETA, HEAD_DIM, scaling))
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(8, rel=2 * FREQUENCY_ERROR)
    assert (np.diff(ratio) >= -2 * FREQUENCY_ERROR * ratio[1:]).all()
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


def test_yarn_scales_cosines_and_sines():
    cos, sin = cos_sin(
        jnp.array([0, 9], jnp.int32), Rope(THETA, HEAD_DIM, YarnScaling(4.0, 512, 1.5))
    )
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=rounding("float32", 8))


def test_dynamic_scaling_lowers_frequencies_only_beyond_the_original_length():
    rope, plain = Rope(THETA, HEAD_DIM, DynamicScaling(2.0, 100)), Rope(THETA, HEAD_DIM)
    positions = np.arange(100)
    atol = 2 * FREQUENCY_ERROR * positions.max()
    np.testing.assert_allclose(angles(positions, rope), angles(positions, plain), rtol=0, atol=atol)
    base = THETA * (2.0 * 151 / 100 - 1) ** (HEAD_DIM / (HEAD_DIM - 2))
    want = 150 * base ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    got = np.exp(1j * angles([150], rope)[0])
    np.testing.assert_allclose(got, np.exp(1j * want), rtol=0, atol=2 * FREQUENCY_ERROR * 150)


def test_dynamic_scaling_depends_only_on_the_position():
    rope = Rope(THETA, HEAD_DIM, DynamicScaling(2.0, 100))
    np.testing.assert_array_equal(angles([150, 7, 900], rope)[0], angles([150, 3, 4], rope)[0])

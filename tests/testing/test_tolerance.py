"""Tolerances: they hold for sums in any order and are not much larger than needed."""

import ml_dtypes
import numpy as np
import pytest

from jaxserve.testing.tiny import tiny_config
from jaxserve.testing.tolerance import assert_close, of_model, rounding, unit


@pytest.mark.parametrize("length", [8, 96, 3000])
def test_sums_in_any_order_are_within_the_tolerance(rng: np.random.Generator, length: int) -> None:
    terms = rng.standard_normal((1000, length)).astype(np.float32)
    exact = terms.astype(np.float64).sum(-1)
    largest = np.abs(terms.astype(np.float64).cumsum(-1)).max()
    tolerance = rounding("float32", length, scale=largest)
    one_by_one = np.add.accumulate(terms, axis=-1)[:, -1]
    for found in (one_by_one, terms.sum(-1), terms[:, ::-1].sum(-1)):
        assert np.abs(found - exact).max() < tolerance
    assert np.abs(one_by_one - exact).max() > tolerance / 50


def test_unit_is_the_rounding_error_of_the_dtype(rng: np.random.Generator) -> None:
    assert unit("float32") == 2.0**-24
    assert unit(np.float16) == 2.0**-11
    assert unit("bfloat16") == unit(ml_dtypes.bfloat16) == 2.0**-8
    x = rng.uniform(1, 100, 10_000)
    assert np.abs(x.astype(np.float32) / x - 1).max() <= unit("float32")


def test_the_tolerance_of_a_model_grows_with_length_and_with_fewer_bits() -> None:
    config = tiny_config()
    short, long, half = (
        of_model(config, count, scale=1.0, dtype=dtype)
        for count, dtype in ((10, "float32"), (1000, "float32"), (10, "bfloat16"))
    )
    assert short < long < 3 * short
    assert half > 1000 * short
    expected = np.array([1.0, -2.0])
    assert_close(expected + 2 * short * 0.99, expected, num_tokens=10)
    with pytest.raises(AssertionError, match="Mismatched elements: 2 / 2"):
        assert_close(expected + 2 * short * 1.01, expected, num_tokens=10)

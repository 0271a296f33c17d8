"""Selection over the vocabulary, compared with sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.vocabulary import argmax, kth_largest, smallest_of_mass, top_k

WIDTHS = (7, 128, 1000, 128 * 70, 128 * 70 + 1)


def values_with_ties(width: int, *, seed: int = 0, rows: int = 5) -> np.ndarray:
    """Returns rounded normal values, which have many ties, and some -inf."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=(rows, width)) * 3, 1).astype(np.float32) + 0
    values[rng.random(values.shape) < 0.1] = -np.inf
    return values


def sorted_ids(values: np.ndarray) -> np.ndarray:
    """Returns IDs in descending order of value, ties by the lowest ID."""
    return np.argsort(-values, axis=-1, kind="stable")


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_takes_the_lowest_id_among_ties(width):
    values = values_with_ties(width, seed=width)
    np.testing.assert_array_equal(jax.jit(argmax)(values), sorted_ids(values)[:, 0])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", [1, 5, 64])
def test_top_k_is_the_head_of_a_stable_sort(width, k):
    k = min(k, width)
    values = values_with_ties(width, seed=width + k)
    found, ids = jax.jit(top_k, static_argnums=1)(values, k)
    expected = sorted_ids(values)[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(values, expected, 1))


@pytest.mark.parametrize("width", WIDTHS)
def test_kth_largest_equals_the_sorted_value(width):
    values = values_with_ties(width, seed=width)
    values[0] = np.random.default_rng(1).normal(size=width) * 1e-30
    values[1, :3] = -0.0, 0.0, -0.0
    k = np.array([1, 2, width // 2, width - 1, width], np.int32)
    expected = -np.sort(-values, -1)[np.arange(len(k)), k - 1]
    np.testing.assert_array_equal(jax.jit(kth_largest)(values, k), expected)


def test_nan_gives_an_index_in_range_and_a_limit_of_nan():
    values = jnp.full((2, 1000), jnp.nan)
    assert np.all((np.asarray(argmax(values)) >= 0) & (np.asarray(argmax(values)) < 1000))
    assert np.isnan(kth_largest(values, jnp.array([1, 500]))).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_smallest_of_mass_equals_a_sum_in_descending_order(width):
    values = values_with_ties(width, seed=width + 2, rows=6)
    weights = np.random.default_rng(width).integers(0, 5, values.shape).astype(np.float32)
    part = np.array([0.1, 0.3, 0.5, 0.9, 1.0, 2.0])
    mass = np.ceil(part * weights.sum(-1)).astype(np.float32)
    found = np.asarray(jax.jit(smallest_of_mass)(values, weights, mass))
    for row, least in enumerate(found):
        enough = [
            v for v in np.unique(values[row]) if weights[row, values[row] >= v].sum() >= mass[row]
        ]
        assert least == max(enough, default=values[row].min())

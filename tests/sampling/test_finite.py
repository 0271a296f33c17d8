"""Logits that are not finite are found wherever they are, and the mark keeps the token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.finite import (
    all_finite,
    marked,
    marked_argmax,
    maxima_in_one_pass,
    maxima_in_two_passes,
    without_marks,
)
from jaxserve.sampling.vocabulary import argmax


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab_size", [5, 128, 300, 49152])
def test_one_bad_logit_is_found_anywhere(vocab_size, bad):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(8, vocab_size)).astype(np.float32) * 1000
    places = [0, vocab_size - 1, *rng.integers(0, vocab_size, 3)]
    rows = rng.permutation(8)[: len(places)]
    assert np.asarray(jax.jit(all_finite)(logits)).all()
    logits[rows, places] = bad
    found = np.asarray(jax.jit(all_finite)(logits))
    np.testing.assert_array_equal(found, ~np.isin(np.arange(8), rows))


def test_infinities_of_both_signs_do_not_cancel():
    logits = np.zeros((2, 300), np.float32)
    logits[0, [3, 4]] = np.inf, -np.inf
    logits[1, [3, 299]] = np.inf, -np.inf
    assert not np.asarray(all_finite(jnp.asarray(logits))).any()


def test_large_logits_are_finite():
    logits = np.full((2, 300), 1e36, np.float32)
    assert np.asarray(all_finite(jnp.asarray(logits))).all()


def test_a_marked_token_is_negative_and_can_be_read():
    tokens = jnp.array([0, 0, 299, 299])
    found = marked(tokens, jnp.array([True, False, True, False]))
    assert (found < 0).tolist() == [False, True, False, True]
    np.testing.assert_array_equal(without_marks(found), tokens)


def random_rows(vocab_size: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits with many ties, and which rows have logits that are not finite."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(32, vocab_size)).round(1).astype(np.float32)
    is_bad = rng.random(32) < 0.5
    for row in np.flatnonzero(is_bad):
        places = rng.integers(0, vocab_size, rng.integers(1, 4))
        logits[row, places] = rng.choice([np.nan, np.inf, -np.inf], len(places))
    return logits, is_bad


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 300, 1000, 49152])
def test_the_marked_argmax_is_argmax_where_all_is_finite(vocab_size):
    logits, is_bad = random_rows(vocab_size, seed=vocab_size)
    found = np.asarray(jax.jit(marked_argmax)(logits))
    np.testing.assert_array_equal(found < 0, is_bad)
    np.testing.assert_array_equal(found[~is_bad], np.asarray(jax.jit(argmax)(logits))[~is_bad])
    np.testing.assert_array_equal(found[~is_bad], logits[~is_bad].argmax(-1))
    taken = np.asarray(without_marks(jnp.asarray(found)))
    assert ((taken >= 0) & (taken < vocab_size)).all()


@pytest.mark.parametrize("vocab_size", [5, 128, 300, 4096])
def test_gpus_and_cpus_find_the_same(vocab_size):
    """A GPU takes one pass over the logits, and a CPU two."""
    logits, _ = random_rows(vocab_size, seed=vocab_size + 1)
    one, two = (np.asarray(jax.jit(f)(logits)) for f in (maxima_in_one_pass, maxima_in_two_passes))
    np.testing.assert_array_equal(one, two)

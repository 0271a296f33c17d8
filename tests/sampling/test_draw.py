"""Random draws follow the softmax, within the top-p set if there is a top_p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.draw import draw, row_keys

NUM_DRAWS = 20_000


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def top_p_set(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Returns a mask of the top-p set, found by sorting. Ties with its last token belong to it."""
    order = np.argsort(-logits, kind="stable")
    probabilities = softmax(logits)[order]
    before = np.cumsum(probabilities) - probabilities
    # A token is in if the sum of the tokens strictly above is below top_p. Ties share this sum.
    first_of_ties = np.searchsorted(-logits[order], -logits[order], side="left")
    kept = np.zeros(len(logits), bool)
    kept[order] = before[first_of_ties] < top_p
    return kept


def draw_many(logits: np.ndarray, top_p: float | None) -> np.ndarray:
    """Draws with `NUM_DRAWS` seeds from one row of logits."""
    seeds = np.stack([np.arange(NUM_DRAWS), np.zeros(NUM_DRAWS)], 1).astype(np.uint32)
    keys = row_keys(jnp.asarray(seeds), jnp.full(NUM_DRAWS, 7))
    many = jnp.broadcast_to(jnp.asarray(logits), (NUM_DRAWS, len(logits)))
    p = None if top_p is None else jnp.full(NUM_DRAWS, top_p, jnp.float32)
    return np.asarray(jax.jit(draw)(many, keys, p))


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Asserts a chi-square test with a limit far out in the tail. Rare tokens are pooled."""
    assert np.all(probabilities[tokens] > 0)
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("width", [5, 300])
def test_draws_follow_the_softmax(width):
    logits = np.random.default_rng(width).normal(size=width).astype(np.float32)
    logits[2] = -np.inf
    assert_follows(draw_many(logits, None), softmax(logits))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("width", [5, 300])
def test_top_p_draws_follow_the_softmax_over_the_top_p_set(width, top_p):
    logits = np.random.default_rng(width).normal(size=width).astype(np.float32) * 2
    expected = np.where(top_p_set(logits, top_p), softmax(logits), 0)
    assert_follows(draw_many(logits, top_p), expected / expected.sum())


def test_ties_with_the_last_token_belong_to_the_top_p_set():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    tokens = draw_many(logits, 0.5)
    assert set(tokens) == {0, 1, 2, 3}
    assert set(draw_many(logits, 0.39)) == {0}


def test_every_draw_is_in_the_top_p_set_of_its_row():
    rng = np.random.default_rng(3)
    rows, width = 400, 1000
    logits = (rng.normal(size=(rows, width)) * rng.uniform(0.1, 5, (rows, 1))).astype(np.float32)
    top_p = rng.uniform(0.01, 1, rows).astype(np.float32)
    keys = row_keys(jnp.asarray(rng.integers(0, 2**32, (rows, 2), np.uint32)), jnp.arange(rows))
    tokens = np.asarray(jax.jit(draw)(logits, keys, top_p))
    for row, token in enumerate(tokens):
        # Slightly above top_p, since sums round differently.
        assert top_p_set(logits[row], top_p[row] + 1e-5)[token]


def test_keys_depend_on_both_halves_of_the_seed_and_on_the_position():
    seeds = jnp.array([[1, 2], [1, 3], [2, 2], [1, 2], [1, 2]], jnp.uint32)
    data = jax.random.key_data(row_keys(seeds, jnp.array([5, 5, 5, 6, 5])))
    distinct = {tuple(row) for row in np.asarray(data).tolist()}
    assert len(distinct) == 4


def test_nan_logits_give_a_token_in_range():
    keys = row_keys(jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.int32))
    tokens = jax.jit(draw)(jnp.full((2, 1000), jnp.nan), keys, jnp.array([0.5, 1.0]))
    assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 1000))


@pytest.mark.parametrize("top_p", [1e-39, 1e-300])
def test_a_top_p_below_the_range_of_float32_draws_the_most_likely_token(top_p):
    logits = np.random.default_rng(3).normal(size=300).astype(np.float32)
    assert set(draw_many(logits, top_p)) == {int(logits.argmax())}

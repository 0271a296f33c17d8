"""Sampling of rows: blocked tokens, masks, biases, filters and draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.inputs import BiasedTokens, BlockedTokens, Filters
from jaxserve.sampling.sampler import filtered_logits, process_logits, sample
from jaxserve.testing.tolerance import rounding

V = 1000
FILTERED = Filters.SMALL_TOP_K


@jax.jit
def sample_tokens(logits, last_tokens, rows):
    """Returns the tokens drawn from the processed logits."""
    return sample(process_logits(logits, last_tokens, rows), rows)[0]


def make_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, V)).astype(np.float32) * 2


def blocked_tokens(*entries: tuple[int, int, int, int]) -> BlockedTokens:
    return BlockedTokens(*jnp.array(entries, jnp.int32).T)


def test_greedy_rows_in_a_mixed_batch_take_the_most_likely_token(make_rows):
    logits = make_logits(6)
    rows = make_rows(6, V, temperature=[0, 1, 0, 1, 0, 0], top_p=0.9, top_k=50, filters=FILTERED)
    tokens = sample_tokens(logits, jnp.zeros(8, jnp.int32), rows)
    greedy = [0, 2, 4, 5]
    np.testing.assert_array_equal(np.asarray(tokens)[greedy], logits.argmax(-1)[greedy])


def test_greedy_rows_take_the_most_likely_token_that_is_not_blocked(make_rows):
    logits = make_logits(2)
    best = logits.argmax(-1)
    blocked = blocked_tokens((0, best[0], -1, 0), (2, 0, -1, 0))
    rows = make_rows(2, V, temperature=0, blocked=blocked)
    tokens = sample_tokens(logits, jnp.zeros(2, jnp.int32), rows)
    logits[0, best[0]] = -np.inf
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_blocks_a_token_only_after_its_previous_token(make_rows):
    logits = make_logits(3)
    best = logits.argmax(-1)
    last_tokens = jnp.array([0, 7, 0, 8], jnp.int32)
    # Rows 0 and 1 follow the tokens 7 and 8 that their entries name; row 2 does not.
    blocked = blocked_tokens((0, best[0], 1, 7), (1, best[1], 3, 8), (2, best[2], 3, 7))
    rows = make_rows(3, V, temperature=0, kept_in_row=4, blocked=blocked)
    tokens = sample_tokens(logits, last_tokens, rows)
    logits[[0, 1], best[:2]] = -np.inf
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def make_mask(*rows: list[int], vocab_size: int = V) -> jnp.ndarray:
    """Returns a mask that allows the given tokens of each row, set bit by bit."""
    mask = np.zeros((len(rows), -(-vocab_size // 32)), np.uint32)
    for row, ids in enumerate(rows):
        for i in ids:
            mask[row, i // 32] |= np.uint32(1 << (i % 32))
    return jnp.asarray(mask)


def test_applies_masks_then_blocked_tokens_then_biases(make_rows):
    logits = np.zeros((3, 70), np.float32)
    logits[:, 0], logits[:, 1], logits[:, 69] = 5, 4, 3
    mask = make_mask([1, 31, 32, 69], [1, 69], [69], vocab_size=70)
    fields = {
        "mask": mask,
        # A bias does not restore a removed token, and the last token left is not removed.
        "blocked": blocked_tokens((0, 1, -1, 0), (1, 1, -1, 0), (2, 69, -1, 0)),
        "biased": BiasedTokens(
            rows=jnp.array([0, 1, 1, 3]), ids=jnp.array([32, 1, 0, 0]), values=jnp.array([3.5] * 4)
        ),
        "temperature": 0,
    }
    rows = make_rows(3, 70, **fields)
    tokens = sample_tokens(logits, jnp.zeros(3, jnp.int32), rows)
    assert tokens.tolist() == [32, 69, 69]


def frequencies_fit(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's test, with the normal approximation of the chi-square distribution."""
    assert counts[probabilities == 0].sum() == 0, "a removed token was drawn"
    expected = probabilities * counts.sum()
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], max(expected[few].sum(), 1e-9))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("filtered", [False, True])
def test_draws_follow_the_softmax_after_masks_and_biases(make_rows, filtered):
    vocab_size, draws = 50, 20_000
    rng = np.random.default_rng(3)
    logits = rng.normal(size=vocab_size).astype(np.float32)
    allowed = sorted(rng.choice(vocab_size, 20, replace=False).tolist())
    ids = rng.choice(vocab_size, 10, replace=False)
    values = rng.normal(size=10).astype(np.float32) * 2
    biased = BiasedTokens(
        rows=jnp.repeat(jnp.arange(draws), 10),
        ids=jnp.tile(jnp.asarray(ids), draws),
        values=jnp.tile(jnp.asarray(values), draws),
    )
    rows = make_rows(
        draws, vocab_size, temperature=0.8, top_k=15 if filtered else vocab_size,
        filters=FILTERED if filtered else Filters.NONE,
        biased=biased, mask=jnp.repeat(make_mask(allowed, vocab_size=vocab_size), draws, 0),
    )  # fmt: skip
    many = np.repeat(logits[None], draws, 0)
    tokens = sample_tokens(many, jnp.zeros(draws, jnp.int32), rows)

    changed = logits.astype(np.float64)
    changed[ids] += values
    changed[np.setdiff1d(np.arange(vocab_size), allowed)] = -np.inf
    if filtered:
        changed[changed < np.sort(changed)[-15]] = -np.inf
    expected = np.exp(changed / 0.8)
    counts = np.bincount(tokens, minlength=vocab_size)
    assert frequencies_fit(counts, expected / expected.sum())
    unbiased = np.exp(np.where(np.isfinite(changed), logits, -np.inf) / 0.8)
    assert not frequencies_fit(counts, unbiased / unbiased.sum()), "a missing bias would pass"


@pytest.mark.parametrize("filters", [Filters.NONE, Filters.SMALL_TOP_K])
def test_a_row_does_not_depend_on_other_rows_its_index_or_the_batch_size(make_rows, filters):
    logits = make_logits(16)
    seeds = np.random.default_rng(1).integers(0, 2**32, (16, 2), np.uint32)
    fields = {"positions": np.arange(16) + 5, "seeds": seeds, "top_p": np.linspace(0.3, 1, 16)}
    last_tokens = jnp.zeros(16, jnp.int32)
    together = sample_tokens(logits, last_tokens, make_rows(16, V, filters=filters, **fields))
    shuffled = np.random.default_rng(2).permutation(16)[:5]
    part = {name: value[shuffled] for name, value in fields.items()}
    subset = sample_tokens(logits[shuffled], last_tokens, make_rows(5, V, filters=filters, **part))
    np.testing.assert_array_equal(subset, np.asarray(together)[shuffled])


def test_top_k_applies_before_top_p(make_rows):
    # top_k keeps 0.4, 0.3 and 0.2; a top_p of 0.7 of their sum (0.63) keeps the first two.
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.05, 0.05]], np.float32))
    many = np.repeat(logits, 500, 0)
    rows = make_rows(500, 5, top_k=3, top_p=0.7, filters=FILTERED)
    tokens = sample_tokens(many, jnp.zeros(500, jnp.int32), rows)
    assert set(np.asarray(tokens).tolist()) == {0, 1}
    # Without top_k, 0.7 of the whole sum also needs the first two, and 0.71 the third.
    rows = make_rows(500, 5, top_p=0.71, filters=FILTERED)
    tokens = sample_tokens(many, jnp.zeros(500, jnp.int32), rows)
    assert set(np.asarray(tokens).tolist()) == {0, 1, 2}


def kept_tokens(probabilities, order, *, temperature, min_p, top_p) -> set[int]:
    """Applies the filters one after another, as probabilities, and returns the tokens left."""
    for name in order:
        if name == "temperature":
            probabilities = probabilities ** (1 / temperature)
        elif name == "min_p":
            is_kept = probabilities >= min_p * probabilities.max()
            probabilities = np.where(is_kept, probabilities, 0)
        else:
            above = np.array([probabilities[probabilities > p].sum() for p in probabilities])
            probabilities = np.where(above < top_p, probabilities, 0)
        probabilities = probabilities / probabilities.sum()
    return set(np.flatnonzero(probabilities).tolist())


def test_min_p_applies_after_the_temperature_and_before_top_p(make_rows):
    probabilities = np.array([0.4, 0.25, 0.15, 0.08, 0.06, 0.04, 0.02])
    values = {"temperature": 2.0, "min_p": 0.3, "top_p": 0.77}
    right, *others = itertools.permutations(values)
    expected = kept_tokens(probabilities, right, **values)
    assert all(kept_tokens(probabilities, order, **values) != expected for order in others)

    logits = np.repeat(np.log(probabilities)[None].astype(np.float32), 2000, 0)
    rows = make_rows(2000, len(probabilities), filters=FILTERED, **values)
    tokens = sample_tokens(logits, jnp.zeros(2000, jnp.int32), rows)
    assert set(np.asarray(tokens).tolist()) == expected


def test_filtered_logits_equal_a_sort_and_keep_the_drawn_token(make_rows):
    """Greedy rows keep all their logits."""
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(size=(60, 300)) * 3, 1).astype(np.float32)
    temperature = rng.choice([0, 0.5, 1.3], 60)
    top_k, top_p, min_p = rng.choice([3, 40, 300], 60), rng.choice([0.2, 0.9, 1], 60), 0.001
    top_k, top_p = np.where(temperature > 0, [top_k, top_p], [[300], [1.0]])
    rows = make_rows(
        60, 300, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=np.where(temperature > 0, min_p, 0), filters=FILTERED,
    )  # fmt: skip

    @jax.jit
    def run(logits):
        tokens, changed = sample(logits, rows)
        return tokens, filtered_logits(changed, tokens, rows)

    tokens, found = map(np.asarray, run(logits))
    for i, scale in enumerate(temperature):
        expected = logits[i].astype(np.float64) / (scale or 1)
        if scale:
            expected[expected < expected.max() + np.log(min_p)] = -np.inf
            expected[expected < np.sort(expected)[::-1][int(top_k[i]) - 1]] = -np.inf
            odds = np.exp(expected - expected.max())
            above = np.array([odds[expected > value].sum() for value in expected])
            if top_p[i] < 1:
                expected[above >= top_p[i] * odds.sum()] = -np.inf
        np.testing.assert_allclose(found[i], expected, rtol=rounding("float32", 2))
        assert found[i, tokens[i]] > -np.inf

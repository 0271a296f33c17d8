import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.rows import BlockedTokens, SamplingFeatures
from jaxserve.sampling.sampler import sample

V = 1000
EVERYTHING = SamplingFeatures(random=True, filters=True, num_logprobs=5)
jitted = jax.jit(sample, static_argnames="features")


def logits_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, V)).astype(np.float32) * 2


def test_greedy_rows_in_a_mixed_batch_take_the_most_likely_token(make_rows):
    logits = logits_of(6)
    rows = make_rows(6, V, temperature=[0, 1, 0, 1, 0, 0], top_p=0.9, top_k=50)
    _, sampled = jitted(logits, jnp.zeros(8, jnp.int32), rows, features=EVERYTHING)
    greedy = [0, 2, 4, 5]
    np.testing.assert_array_equal(np.asarray(sampled.tokens)[greedy], logits.argmax(-1)[greedy])


def test_greedy_rows_take_the_most_likely_of_what_is_not_blocked(make_rows):
    logits = logits_of(2)
    best = logits.argmax(-1)
    blocked = BlockedTokens(rows=jnp.array([0, 2]), ids=jnp.array([best[0], 0]))
    rows = make_rows(2, V, temperature=0, blocked=blocked)
    _, sampled = jitted(
        logits, jnp.zeros(2, jnp.int32), rows, features=SamplingFeatures(blocked=True)
    )
    logits[0, best[0]] = -np.inf
    np.testing.assert_array_equal(sampled.tokens, logits.argmax(-1))


def test_tokens_go_to_their_targets_and_nowhere_else(make_rows):
    last_tokens = jnp.array([10, 11, 12, 13], jnp.int32)
    rows = make_rows(3, V, targets=[2, 4, 0])
    after, sampled = jitted(logits_of(3), last_tokens, rows, features=SamplingFeatures(random=True))
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_array_equal(after, [tokens[2], 11, tokens[0], 13])


@pytest.mark.parametrize(
    "features", [SamplingFeatures(random=True), SamplingFeatures(random=True, filters=True)]
)
def test_a_row_does_not_depend_on_its_neighbours_place_or_batch_size(make_rows, features):
    logits = logits_of(16)
    seeds = np.random.default_rng(1).integers(0, 2**32, (16, 2), np.uint32)
    fields = {"positions": np.arange(16) + 5, "seeds": seeds, "top_p": np.linspace(0.3, 1, 16)}
    last_tokens = jnp.zeros(16, jnp.int32)
    _, together = jitted(logits, last_tokens, make_rows(16, V, **fields), features=features)
    shuffled = np.random.default_rng(2).permutation(16)[:5]
    part = {name: value[shuffled] for name, value in fields.items()}
    _, apart = jitted(logits[shuffled], last_tokens, make_rows(5, V, **part), features=features)
    np.testing.assert_array_equal(apart.tokens, np.asarray(together.tokens)[shuffled])


def test_filters_apply_in_order_min_p_top_k_top_p(make_rows):
    # top_k leaves 0.4 0.3 0.2, top_p 0.7 of what is left (0.63) leaves the first two.
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.05, 0.05]], np.float32))
    many = np.repeat(logits, 500, 0)
    rows = make_rows(500, 5, top_k=3, top_p=0.7)
    features = SamplingFeatures(random=True, filters=True)
    _, sampled = jitted(many, jnp.zeros(500, jnp.int32), rows, features=features)
    assert set(np.asarray(sampled.tokens).tolist()) == {0, 1}
    # Without top_k, 0.7 of everything needs the first two as well, 0.71 the third.
    _, sampled = jitted(
        many, jnp.zeros(500, jnp.int32), make_rows(500, 5, top_p=0.71), features=features
    )
    assert set(np.asarray(sampled.tokens).tolist()) == {0, 1, 2}

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.logprobs import compute_logprobs, to_message
from jaxserve.sampling.rows import SamplingFeatures
from jaxserve.sampling.sampler import sample


def reference(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_values_ranks_and_order_against_a_sort():
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(6, 500)) * 3, 1).astype(np.float32)
    tokens = rng.integers(0, 500, 6).astype(np.int32)
    found = jax.tree.map(np.asarray, compute_logprobs(jnp.asarray(logits), tokens, 5))
    expected = reference(logits)
    for row, token in enumerate(tokens.tolist()):
        order = np.argsort(-logits[row], kind="stable")[:3].tolist()
        message = to_message(found, row, token, 3)
        assert message.token_ids == [token, *order]
        np.testing.assert_allclose(
            message.logprobs, expected[row][[token, *order]], rtol=1e-5, atol=1e-5
        )
        assert message.rank == 1 + (logits[row] > logits[row, token]).sum()


def test_no_top_tokens_leaves_the_sampled_one():
    found = compute_logprobs(jnp.zeros((1, 10)), jnp.array([3]), 1)
    message = to_message(jax.tree.map(np.asarray, found), 0, 3, 0)
    assert message.token_ids == [3]
    assert message.rank == 1
    np.testing.assert_allclose(message.logprobs, [-np.log(10)], rtol=1e-6)


def test_they_are_those_of_the_model_not_of_the_changed_logits(make_rows):
    logits = np.random.default_rng(1).normal(size=(3, 200)).astype(np.float32)
    rows = make_rows(3, 200, temperature=0.3, top_k=2)
    features = SamplingFeatures(random=True, filters=True, num_logprobs=20)
    jitted = jax.jit(sample, static_argnames="features")
    _, sampled = jitted(jnp.asarray(logits), jnp.zeros(3, jnp.int32), rows, features=features)
    expected = reference(logits)
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_allclose(
        sampled.logprobs.sampled, expected[np.arange(3), tokens], rtol=1e-5, atol=1e-5
    )
    greedy = dataclasses.replace(features, random=False)
    jitted = jax.jit(sample, static_argnames="features")
    _, sampled = jitted(jnp.asarray(logits), jnp.zeros(3, jnp.int32), rows, features=greedy)
    np.testing.assert_array_equal(sampled.logprobs.top_ids[:, 0], sampled.tokens)

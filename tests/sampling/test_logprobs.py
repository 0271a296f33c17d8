"""Log probabilities: values, ranks, and the most likely tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.logprobs import compute_logprobs, logprobs_size, to_message
from jaxserve.testing.tolerance import rounding


def reference(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_values_ranks_and_order_equal_a_sort():
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(6, 500)) * 3, 1).astype(np.float32)
    tokens = rng.integers(0, 500, 6).astype(np.int32)
    found = jax.tree.map(np.asarray, compute_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 5))
    expected = reference(logits)
    for row, token in enumerate(tokens.tolist()):
        order = np.argsort(-logits[row], kind="stable")[:3].tolist()
        message = to_message(found, row, token, 3)
        assert message.token_ids == (token, *order)
        # A relative error of a sum is an absolute error of its logarithm; two subtractions follow.
        atol = rounding("float32", 500) + rounding("float32", 2, scale=np.abs(expected[row]).max())
        np.testing.assert_allclose(
            message.logprobs, expected[row][[token, *order]], rtol=0, atol=atol
        )
        assert message.rank == 1 + (logits[row] > logits[row, token]).sum()


def test_zero_top_tokens_returns_only_the_sampled_token():
    found = compute_logprobs(jnp.zeros((1, 10)), jnp.array([3]), 1)
    message = to_message(jax.tree.map(np.asarray, found), 0, 3, 0)
    assert message.token_ids == (3,)
    assert message.rank == 1
    np.testing.assert_allclose(message.logprobs, [-np.log(10)], rtol=rounding("float32", 10))


def test_as_logits_returns_logits():
    logits = np.random.default_rng(1).normal(size=(2, 400)).astype(np.float32)
    logits[:, ::3] = -np.inf
    found = compute_logprobs(jnp.asarray(logits), jnp.array([3, 5]), 2, as_logits=True)
    message = to_message(jax.tree.map(np.asarray, found), 0, 3, 2)
    best = np.argsort(-logits[0])[:2].tolist()
    assert message.token_ids == (3, *best)
    assert message.logprobs == (-np.inf, *logits[0, best].tolist())
    assert message.rank == 1 + np.isfinite(logits[0]).sum()


def test_few_sizes_hold_every_number_of_tokens():
    sizes = {k: logprobs_size(k, 1000) for k in range(1001)}
    assert all(size >= k for k, size in sizes.items())
    assert sorted(set(sizes.values())) == [20, 80, 320, 1000]
    assert logprobs_size(5, 7) == 7

"""Stages of the sampler, one by one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import stages
from jaxserve.sampling.inputs import BlockedTokens, Filters, SeenTokens
from jaxserve.testing.tolerance import rounding

V = 300


@pytest.fixture
def logits() -> np.ndarray:
    return np.round(np.random.default_rng(0).normal(size=(4, V)) * 3, 1).astype(np.float32)


def ints(*values: int) -> jnp.ndarray:
    return jnp.array(values, jnp.int32)


def test_block_tokens_removes_tokens_and_ignores_padding(logits, make_rows):
    blocked = BlockedTokens(
        rows=ints(0, 0, 3, 4, 4), ids=ints(5, 6, 299, 0, 1), previous_row=ints(*[-1] * 5),
        previous_token=ints(*[0] * 5),
    )  # fmt: skip
    rows = make_rows(4, V, blocked=blocked)
    changed = stages.block_tokens(jnp.asarray(logits), rows)
    expected = logits.copy()
    expected[[0, 0, 3], [5, 6, 299]] = -np.inf
    np.testing.assert_array_equal(changed, expected)


def reference_penalties(logits, prompt, output, repetition, frequency, presence):
    """Penalises one row, token by token, as the OpenAI and Hugging Face documents define it."""
    changed = logits.astype(np.float64)
    for token in {*prompt, *output}:
        value = changed[token]
        changed[token] = value / repetition if value > 0 else value * repetition
        count = output.count(token)
        changed[token] -= frequency * count + presence * (count > 0)
    return changed


@pytest.mark.parametrize("pending", [None, 7, 8, 200])
def test_penalties_count_prompt_output_and_the_pending_token(logits, make_rows, pending):
    prompt, output = [1, 2, 7], [7, 7, 8, 9]
    known = sorted({*prompt, *output})
    seen = SeenTokens(
        rows=ints(*[1] * len(known), 4, 4, 4),
        ids=ints(*known, 0, 7, 8),
        counts=ints(*[output.count(token) for token in known], 0, 0, 0),
        pending_row=ints(-1, -1 if pending is None else 6, -1, -1),
    )
    last_tokens = ints(7, 7, 8, 200, 1, 1, pending or 0, 8)
    rows = make_rows(4, V, seen=seen, repetition=1.3, frequency=0.5, presence=0.25)
    rows = dataclasses.replace(rows, seen=rows.seen.with_pending(last_tokens))
    changed = stages.penalise(jnp.asarray(logits), rows)
    expected = logits.astype(np.float64)
    output = output if pending is None else [*output, pending]
    expected[1] = reference_penalties(logits[1], prompt, output, 1.3, 0.5, 0.25)
    # The roundings of a factor, and of the products and differences of two penalties.
    atol = rounding("float32", 5, scale=np.abs(expected).max())
    np.testing.assert_allclose(changed, expected, rtol=0, atol=atol)


def test_temperature_divides_logits_and_keeps_greedy_rows(logits, make_rows):
    rows = make_rows(4, V, temperature=[0, 0.5, 1, 2])
    changed = stages.scale_by_temperature(jnp.asarray(logits), rows)
    np.testing.assert_allclose(
        changed, logits / np.array([[1], [0.5], [1], [2]]), rtol=rounding("float32", 2)
    )


def test_min_p_is_relative_to_the_most_likely_token(logits, make_rows):
    min_p = np.array([0, 0.1, 0.5, 1])
    rows = make_rows(4, V, min_p=min_p, filters=Filters.SMALL_TOP_K)
    changed = np.asarray(stages.keep_min_p(jnp.asarray(logits), rows))
    ratio = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    np.testing.assert_array_equal(np.isfinite(changed), ratio >= min_p[:, None])


@pytest.mark.parametrize("large", [False, True])
def test_top_k_keeps_the_k_largest_and_their_ties(logits, make_rows, large):
    top_k = [1, 5, 290 if large else 64, V]
    filters = Filters.LARGE_TOP_K if large else Filters.SMALL_TOP_K
    rows = make_rows(4, V, top_k=top_k, filters=filters)
    changed = np.asarray(stages.keep_top_k(jnp.asarray(logits), rows))
    for row, k in enumerate(top_k):
        least = np.sort(logits[row])[::-1][k - 1]
        np.testing.assert_array_equal(
            changed[row], np.where(logits[row] >= least, logits[row], -np.inf)
        )


@pytest.mark.parametrize(
    "stage", [stages.block_tokens, stages.penalise, stages.keep_min_p, stages.keep_top_k]
)  # fmt: skip
def test_an_unneeded_stage_returns_its_input(logits, make_rows, stage):
    given = jnp.asarray(logits)
    rows = make_rows(4, V, min_p=0.5, top_k=3)
    assert stage(given, rows) is given

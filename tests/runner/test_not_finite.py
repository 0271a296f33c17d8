"""A request whose logits or vector are not finite ends with an error, and no other does.

The embedding of one token is NaN, as in a damaged checkpoint. A request that meets the token gets
NaN from there on.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.speculation import Speculation
from jaxserve.ipc.messages import FinishReason
from jaxserve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("compile_quickly")

VOCAB, LENGTH, K, ROWS = 300, 96, 3, 8
BAD = 77
LAST = 9
"""Output tokens that at least come before the first NaN of a request that samples the bad token."""

VARIANTS = {
    "one step in flight": {},
    "two steps in flight": {"depth": 2},
    "one at a time": {"max_num_seqs": 1, "depth": 2},
    "chunked": {"max_num_batched_tokens": 9, "depth": 2},
    "preempted": {"num_blocks": 25, "depth": 2},
}


def sampling(**fields):
    return SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 20, **fields})


def prompt(seed: int, length: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, length)
    return [seed, *np.where(tokens == BAD, BAD + 1, tokens).tolist()[1:]]


GOOD = {
    "greedy": (prompt(1, 7), sampling()),
    "sampled": (prompt(2, 21), sampling(temperature=0.9, top_p=0.9, seed=4)),
    "scored": (prompt(3, 12), sampling(logprobs=2, prompt_logprobs=1)),
    "pooled": (prompt(4, 15), sampling(pooling="mean")),
}
"""Requests that never meet the token; `test_the_others_never_meet_the_token` checks it."""

BROKEN = {
    "greedy": (prompt(11, 9), sampling()),
    "drawn": (prompt(12, 9), sampling(temperature=1.0, seed=3)),
    "filtered": (prompt(13, 9), sampling(temperature=0.7, top_k=5, min_p=0.1, seed=3)),
    "masked": (prompt(14, 9), sampling(allowed_token_ids=(1, 2, 3), temperature=0.5)),
    "penalised": (prompt(15, 9), sampling(repetition_penalty=1.3, logit_bias={4: 2.0})),
    "logprobs": (prompt(16, 9), sampling(logprobs=3, temperature=0.5)),
    "prompt logprobs": (prompt(17, 40), sampling(prompt_logprobs=2)),
    "last": (prompt(18, 9), sampling(pooling="last")),
    "mean": (prompt(19, 40), sampling(pooling="mean")),
}


def with_bad_token(tokens: list[int], place: int) -> list[int]:
    return [*tokens[:place], BAD, *tokens[place + 1 :]]


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def expected(generate):
    """The outputs of sound weights."""
    return generate(GOOD)


@pytest.fixture(scope="module")
def damaged_params(tiny_model):
    embed = tiny_model.params["embed"].at[BAD].set(jnp.nan)
    return {**tiny_model.params, "embed": embed}


@pytest.fixture(scope="module")
def damaged(build_runner, damaged_params):
    return build_runner(damaged_params)


def check_good(outputs, expected):
    for name, wanted in expected.items():
        assert tokens_of(outputs[name]) == tokens_of(wanted), name
        assert outputs[name][-1].finish_reason == wanted[-1].finish_reason
        assert outputs[name][-1].error is None
        if name == "pooled":
            np.testing.assert_allclose(
                outputs[name][-1].embedding, wanted[-1].embedding, rtol=0, atol=1e-4
            )


def test_the_others_never_meet_the_token(expected):
    for name, outputs in expected.items():
        assert BAD not in [*GOOD[name][0], *tokens_of(outputs)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("place", [0, 4, 8])
def test_only_the_request_that_meets_the_token_fails(generate, damaged, expected, variant, place):
    broken = {f"broken {k}": (with_bad_token(p, place), s) for k, (p, s) in BROKEN.items()}
    requests = {**dict(list(broken.items())[:4]), **GOOD, **broken}
    outputs = generate(requests, runner=damaged, **VARIANTS[variant])
    check_good(outputs, expected)
    for name in broken:
        (output,) = outputs[name]
        assert (output.token_ids, output.embedding) == ([], None)
        assert output.prompt_logprobs is None
        assert output.finish_reason == FinishReason.ERROR
        kind = "hidden states" if requests[name][1].pooling else "logits"
        assert f"the model gave this request {kind} that are not finite" in output.error
    assert generate.stats.num_running == generate.stats.kv_usage == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 6, "logprobs": 1}], ids=["greedy", "drawn"]
)
def test_tokens_before_the_first_nan_are_delivered(
    generate, build_runner, tiny_model, params, depth
):
    request = (prompt(21, 6), sampling(**params))
    tokens = tokens_of(generate({"a": request})["a"])
    count = next(i for i in range(LAST, len(tokens)) if tokens[i] not in [*request[0], *tokens[:i]])
    embed = tiny_model.params["embed"].at[tokens[count]].set(jnp.nan)
    runner = build_runner({**tiny_model.params, "embed": embed})
    outputs = generate({"a": request}, runner=runner, depth=depth)["a"]
    assert tokens_of(outputs) == tokens[: count + 1]
    assert [o.finish_reason for o in outputs] == [None] * (count + 1) + [FinishReason.ERROR]


def test_a_stop_at_the_token_before_the_first_nan_is_no_error(generate, build_runner, tiny_model):
    """The step that computes NaN has started by then, and its result is dropped."""
    tokens = tokens_of(generate({"a": (prompt(21, 6), sampling())})["a"])
    count = next(i for i in range(LAST, len(tokens)) if tokens[i] not in tokens[:i])
    embed = tiny_model.params["embed"].at[tokens[count]].set(jnp.nan)
    runner = build_runner({**tiny_model.params, "embed": embed})
    request = (prompt(21, 6), sampling(stop_token_ids=(tokens[count],)))
    outputs = generate({"a": request}, runner=runner, depth=2)["a"]
    assert tokens_of(outputs) == tokens[: count + 1]
    assert outputs[-1].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_bad_column_of_the_head_fails_every_request(
    generate, build_runner, tiny_model, depth, bad
):
    """Also if the token is not the most likely one."""
    head = tiny_model.params["head"].at[0, 200].set(bad)
    runner = build_runner({**tiny_model.params, "head": head})
    requests = {k: pair for k, pair in GOOD.items() if k != "pooled"}
    outputs = generate(requests, runner=runner, depth=depth)
    for (output,) in outputs.values():
        assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)


def test_logits_of_the_prompt_alone_can_fail(generate, build_runner, tiny_model):
    """The logits of one prompt position overflow, and those of the last position do not."""
    tokens = prompt(31, 12)
    hidden = tiny_model.hidden(tokens)
    final = hidden * np.asarray(tiny_model.params["scale"])
    # The product with the column is larger at this position than at any other.
    place = next(i for i in range(11) if (final @ np.sign(final[i])).argmax() == i)
    column = np.sign(final[place])
    least, largest = np.sort(final @ column)[-2:]
    limit = np.finfo(np.float32).max / ((least + largest) / 2)
    head = tiny_model.params["head"].at[:, 200].set(jnp.asarray(column * limit, jnp.float32))
    runner = build_runner({**tiny_model.params, "head": head})
    requests = {
        "scored": (tokens, sampling(prompt_logprobs=0, max_tokens=1)),
        "plain": (tokens, sampling(max_tokens=1)),
    }
    outputs = generate(requests, runner=runner)
    assert outputs["scored"][-1].finish_reason == FinishReason.ERROR
    assert outputs["plain"][-1].finish_reason == FinishReason.LENGTH


def test_ignored_values_change_nothing_else(generate, build_runner, damaged_params, expected):
    runner = build_runner(damaged_params, checks_finite=False)
    broken = {f"broken {k}": (with_bad_token(p, 4), s) for k, (p, s) in BROKEN.items()}
    outputs = generate({**broken, **GOOD}, runner=runner, depth=2)
    check_good(outputs, expected)
    for name, (_, params) in broken.items():
        if params.pooling is None:
            tokens = tokens_of(outputs[name])
            assert len(tokens) == 20
            assert all(0 <= token < VOCAB for token in tokens)
            assert outputs[name][-1].finish_reason == FinishReason.LENGTH


class TestSpeculation:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize(
        "params", [{}, {"temperature": 0.8, "seed": 6, "logprobs": 1}], ids=["greedy", "drawn"]
    )
    def test_drafts_before_the_first_nan_are_delivered(
        self, generate, build_runner, tiny_model, tiny_sizes, expected, params, depth
    ):
        request = (prompt(21, 6), sampling(**params))
        tokens = tokens_of(generate({"a": request})["a"])
        good = [t for outputs in expected.values() for t in tokens_of(outputs)]
        good += [t for name in GOOD for t in GOOD[name][0]]
        count = next(
            i
            for i in range(LAST, len(tokens))
            if tokens[i] not in [*request[0], *tokens[:i], *good]
        )
        known = np.zeros(LENGTH + K, np.int32)
        known[: 6 + len(tokens)] = [*request[0], *tokens]

        def propose(stored, num_tokens, *, num_drafts):
            """Proposes the right tokens, for every request: the others reject them."""
            places = jnp.minimum(num_tokens[:, None] + jnp.arange(num_drafts), LENGTH)
            drafts = jnp.asarray(known)[places]
            return drafts, jnp.full(len(stored), num_drafts)

        embed = tiny_model.params["embed"].at[tokens[count]].set(jnp.nan)
        runner = build_runner(
            {**tiny_model.params, "embed": embed},
            sizes=dataclasses.replace(tiny_sizes, max_num_seqs=ROWS, max_drafts=K),
            propose=propose,
        )
        speculation = Speculation(K, step_costs=((ROWS, 1.0),))
        outputs = generate(
            {"a": request, **GOOD}, runner=runner, depth=depth, speculation=speculation
        )
        assert sum(generate.stats.accepted_per_position) > 4
        check_good(outputs, expected)
        assert tokens_of(outputs["a"]) == tokens[: count + 1]
        assert outputs["a"][-1].finish_reason == FinishReason.ERROR

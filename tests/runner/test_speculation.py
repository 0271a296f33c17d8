"""Speculation in a running engine: it changes how many steps a request takes, and nothing else."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.speculation import Speculation
from jaxserve.ipc.messages import FinishReason
from jaxserve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("compile_quickly")

VOCAB, LENGTH, K = 300, 96, 3
ROWS = 12
SPECULATION = Speculation(K, step_costs=((ROWS, 1.0),))
LENGTHS = (1, 3, 17, 40, 70, 8, 22, 5)
# Unique first tokens: the proposer recognises a request by its first token.
PROMPTS = [
    [i, *np.random.default_rng(i).integers(0, VOCAB, length - 1).tolist()]
    for i, length in enumerate(LENGTHS)
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, seed=0, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=24, seed=5),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=23, seed=-(2**63), logprobs=0),
    SamplingParams(temperature=0, max_tokens=22, seed=3),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, max_tokens=20, seed=4, logprobs=1),
    SamplingParams(
        temperature=1.5, top_k=20, min_p=0.01, max_tokens=24, seed=2**63 - 1, prompt_logprobs=2
    ),
    SamplingParams(
        temperature=0.8, logit_bias={7: 3.0, 250: -100.0}, max_tokens=20, seed=7,
        allowed_token_ids=tuple(range(0, VOCAB, 2)),
    ),
    SamplingParams(temperature=0, bad_words_token_ids=((4, 5), (7,)), max_tokens=12, seed=8),
]  # fmt: skip
REQUESTS = {str(i): pair for i, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))}
VARIANTS = {
    "alone": {"max_num_seqs": 1},
    "two at a time": {"max_num_seqs": 2},
    "batched": {},
    "overlapped": {"depth": 2},
    "alone and overlapped": {"depth": 2, "max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 9},
    "chunked and overlapped": {"max_num_batched_tokens": 9, "depth": 2},
    "preempted": {"num_blocks": 25},
    "preempted and overlapped": {"num_blocks": 25, "depth": 2},
    "arriving one by one": {"stagger": 3, "depth": 2},
}


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


class Oracle:
    """Proposes what a plain engine generated, with errors at some positions."""

    def __init__(self) -> None:
        self.sequences = np.zeros((VOCAB, LENGTH + K), np.int32)

    def __call__(self, tokens, num_tokens, *, num_drafts):
        def sequences(first):
            return self.sequences[first]

        shape = jax.ShapeDtypeStruct((len(tokens), self.sequences.shape[1]), jnp.int32)
        known = jax.pure_callback(sequences, shape, tokens[:, 0], vmap_method="sequential")
        places = num_tokens[:, None] + jnp.arange(num_drafts)
        drafts = jnp.take_along_axis(known, jnp.minimum(places, known.shape[1] - 1), 1)
        wrong = places % 7 == 5
        return jnp.where(wrong, (drafts + 1) % VOCAB, drafts), jnp.where(
            num_tokens % 11 == 3, num_drafts - 1, num_drafts
        )


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture(scope="module")
def speculating(build_runner, tiny_sizes, oracle):
    sizes = dataclasses.replace(tiny_sizes, max_num_seqs=ROWS, max_drafts=K)
    return build_runner(sizes=sizes, propose=oracle)


@pytest.fixture(scope="module")
def plain(generate, oracle):
    """Returns the outputs of an engine without speculation, and lets the oracle see them."""
    outputs = generate(REQUESTS)
    for name, (prompt, _) in REQUESTS.items():
        sequence = prompt + tokens_of(outputs[name])
        oracle.sequences[prompt[0], : len(sequence)] = sequence
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_equal_those_without_speculation(generate, plain, speculating, tiny_model, variant):
    outputs = generate(REQUESTS, runner=speculating, speculation=SPECULATION, **VARIANTS[variant])
    stats = generate.stats
    assert sum(stats.accepted_per_position) > 20
    assert stats.total_draft_tokens > sum(stats.accepted_per_position)
    if "preempted" in variant:
        assert stats.total_preemptions > 0
    for name, expected in plain.items():
        assert tokens_of(outputs[name]) == tokens_of(expected)
        assert outputs[name][-1].finish_reason == expected[-1].finish_reason
        check_logprobs(outputs[name], expected, tiny_model, len(REQUESTS[name][0]))
        assert prompt_entries(outputs[name]) == prompt_entries(expected)


def prompt_entries(outputs):
    """Returns the token IDs of the log probabilities of the prompt."""
    return [entry and entry.token_ids for entry in outputs[0].prompt_logprobs or ()]


def check_logprobs(outputs, expected, model, num_prompt_tokens):
    """The same entries for the same tokens, up to the rounding of steps of other shapes."""
    if expected[0].logprobs is None:
        assert all(output.logprobs is None for output in outputs)
        return
    assert [len(o.logprobs) for o in outputs] == [len(o.token_ids) for o in outputs]
    found = [entry for output in outputs for entry in output.logprobs]
    wanted = [entry for output in expected for entry in output.logprobs]
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
        atol = model.tolerance(num_prompt_tokens + i, of="logits")
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize("depth", [1, 2])
def test_fewer_steps_give_the_same_tokens(generate, plain, speculating, depth):
    request = {"3": REQUESTS["3"]}
    outputs = generate(request, runner=speculating, speculation=SPECULATION, depth=depth)["3"]
    assert tokens_of(outputs) == tokens_of(plain["3"])
    assert max(len(output.token_ids) for output in outputs) == 1 + K
    assert len(outputs) < len(plain["3"]) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_a_request_within_accepted_tokens(generate, plain, speculating, depth):
    prompt, params = REQUESTS["3"]
    tokens = tokens_of(plain["3"])
    ends = set()
    for place in range(4, 16):
        stops = SamplingParams(
            temperature=0, seed=3, max_tokens=22, stop_token_ids=(tokens[place],), logprobs=1
        )
        outputs = generate(
            {"a": (prompt, stops)}, runner=speculating, speculation=SPECULATION, depth=depth
        )["a"]
        assert tokens_of(outputs) == tokens[: tokens.index(tokens[place]) + 1]
        assert outputs[-1].finish_reason == FinishReason.STOP
        assert outputs[-1].stop_reason == tokens[place]
        assert len(outputs[-1].logprobs) == len(outputs[-1].token_ids)
        ends.add(len(outputs[-1].token_ids))
    assert len(ends) > 1


def test_stop_tokens_are_blocked_until_min_tokens(generate, plain, speculating):
    prompt, _ = REQUESTS["3"]
    stops = tuple(set(tokens_of(plain["3"])))
    params = SamplingParams(
        temperature=0, seed=3, max_tokens=22, min_tokens=5, stop_token_ids=stops
    )
    expected = generate({"a": (prompt, params)})["a"]
    outputs = generate({"a": (prompt, params)}, runner=speculating, speculation=SPECULATION)["a"]
    assert tokens_of(outputs) == tokens_of(expected)
    assert len(tokens_of(outputs)) > 5


def test_one_row_is_enough_for_drafts(generate, plain, oracle, build_runner, tiny_sizes):
    sizes = dataclasses.replace(tiny_sizes, max_num_seqs=1, max_drafts=K)
    runner = build_runner(sizes=sizes, propose=oracle)
    assert max(bucket.num_rows for bucket in runner.buckets.all) == 1 + K
    speculation = Speculation(K, step_costs=((1 + K, 1.0),))
    outputs = generate(
        {"0": REQUESTS["0"], "1": REQUESTS["1"]}, runner=runner, speculation=speculation,
        max_num_seqs=1, depth=2,
    )  # fmt: skip
    assert tokens_of(outputs["0"]) == tokens_of(plain["0"])
    assert tokens_of(outputs["1"]) == tokens_of(plain["1"])
    assert sum(generate.stats.accepted_per_position) > 10


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_nothing_is_compiled_after_warm_up(
    generate, plain, oracle, build_runner, tiny_sizes, caplog, max_num_seqs
):
    sizes = dataclasses.replace(tiny_sizes, max_num_seqs=max_num_seqs, max_drafts=K)
    runner = build_runner(sizes=sizes, propose=oracle)
    names = []
    runner.warm_up(lambda done, total, name: names.append(name))
    before = runner.num_compilations
    assert [rows for rows, _ in runner.step_costs] == [2, 4]
    costs = [cost for _, cost in runner.step_costs]
    assert costs == sorted(costs)
    assert costs[0] > 0
    speculation = Speculation(K, step_costs=((4, 1.0),))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        for depth in (1, 2):
            outputs = generate(
                REQUESTS, runner=runner, speculation=speculation, depth=depth,
                max_num_seqs=max_num_seqs,
            )  # fmt: skip
            assert tokens_of(outputs["0"]) == tokens_of(plain["0"])
    assert runner.num_compilations == before
    assert not caplog.records


def test_a_plan_without_drafts_runs_the_programs_of_a_plain_engine(generate, speculating, plain):
    """Drafts that never pay leave nothing behind but the estimates on the host."""
    never = Speculation(K, step_costs=tuple((rows, 100.0**rows) for rows in range(1, 5)))
    before = speculating._speculator._store
    outputs = generate(REQUESTS, runner=speculating, speculation=never, depth=2)
    assert speculating._speculator._store is before
    assert {n: tokens_of(o) for n, o in outputs.items()} == {
        n: tokens_of(o) for n, o in plain.items()
    }


def test_padding_does_not_change_the_tokens_on_the_device(generate, speculating, plain):
    generate(REQUESTS, runner=speculating, speculation=SPECULATION)
    store = speculating._speculator._store
    before = jax.tree.map(np.array, store)
    cache = np.array(speculating._state.kv.k)
    last_tokens = np.array(speculating._state.last_tokens)
    speculating.warm_up(lambda *_: None)
    after = speculating._speculator._store
    np.testing.assert_array_equal(after.tokens, before.tokens)
    np.testing.assert_array_equal(after.num_tokens, before.num_tokens)
    np.testing.assert_array_equal(speculating._state.kv.k, cache)
    np.testing.assert_array_equal(speculating._state.last_tokens, last_tokens)

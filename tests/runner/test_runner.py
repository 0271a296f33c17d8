"""Scheduler, runner and sampler together, compared with a full recomputation of each sequence."""

from __future__ import annotations

import itertools
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import FinishReason, RequestOutput, Submit
from jaxserve.sampling_params import SamplingParams

VOCAB = 300


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy_reference(model, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model.last_logits(tokens).argmax()))
    return tokens[len(prompt) :]


GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=0)
PROMPTS = prompts(1, 3, 17, 40, 70, 8, 22, 5)
VARIANTS = {
    "alone": {"max_num_seqs": 1},
    "two at a time": {"max_num_seqs": 2},
    "batched": {},
    "overlapped": {"depth": 2},
    "chunked": {"max_num_batched_tokens": 9},
    "chunked and overlapped": {"max_num_batched_tokens": 9, "depth": 2},
    "preempted": {"num_blocks": 25},
    "preempted and overlapped": {"num_blocks": 25, "depth": 2},
    "arriving one by one": {"stagger": 3, "depth": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_full_recomputation(tiny_model, generate, variant):
    requests = {str(i): (prompt, GREEDY) for i, prompt in enumerate(PROMPTS)}
    outputs = generate(requests, **VARIANTS[variant])
    if "preempted" in variant:
        assert generate.preemptions > 0
    for name, (prompt, params) in requests.items():
        expected = greedy_reference(tiny_model, prompt, params.max_tokens)
        assert tokens_of(outputs[name]) == expected


MIXED_PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=12, seed=5),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=12, seed=-(2**63)),
    SamplingParams(temperature=1.5, top_k=20, min_p=0.01, max_tokens=12, seed=2**63 - 1),
    SamplingParams(temperature=0, max_tokens=12, seed=3),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, max_tokens=12, seed=4),
    SamplingParams(
        temperature=0, frequency_penalty=1.0, presence_penalty=0.5, max_tokens=12, seed=6
    ),
    SamplingParams(
        temperature=0.8, logit_bias={7: 3.0, 250: -100.0}, max_tokens=12, seed=7,
        bad_words_token_ids=tuple((a, b) for a in range(0, VOCAB, 3) for b in (7, 8, 9)),
    ),
    SamplingParams(
        temperature=1.2, allowed_token_ids=tuple(range(0, VOCAB, 7)), max_tokens=12, seed=8
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def sampled_alone(generate) -> dict[str, list[int]]:
    requests = zip(PROMPTS, MIXED_PARAMS, strict=True)
    alone = {}
    for i, request in enumerate(requests):
        alone[str(i)] = tokens_of(generate({"0": request}, max_num_seqs=1)["0"])
    return alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_scheduling_does_not_change_seeded_samples(generate, sampled_alone, variant):
    requests = {
        str(i): request for i, request in enumerate(zip(PROMPTS, MIXED_PARAMS, strict=True))
    }
    outputs = generate(requests, **VARIANTS[variant])
    assert {name: tokens_of(out) for name, out in outputs.items()} == sampled_alone


def test_different_seeds_give_different_tokens(generate):
    params = [SamplingParams(temperature=2, max_tokens=8, seed=s) for s in (0, 1, 2**32, -1)]
    outputs = generate({str(i): (PROMPTS[2], p) for i, p in enumerate(params)})
    assert len({tuple(tokens_of(out)) for out in outputs.values()}) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_equal_a_reference_loop(tiny_model, generate, depth):
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3,
        max_tokens=20, seed=0,
    )  # fmt: skip
    tokens = list(PROMPTS[2])
    for _ in range(20):
        logits = tiny_model.last_logits(tokens).astype(np.float64)
        output = tokens[len(PROMPTS[2]) :]
        for token in set(tokens):
            logits[token] *= 1.5 if logits[token] < 0 else 1 / 1.5
            logits[token] -= 0.7 * output.count(token) + 0.3 * (token in output)
        tokens.append(int(logits.argmax()))
    outputs = generate({"a": (PROMPTS[2], params), "b": (PROMPTS[3], params)}, depth=depth)
    assert tokens_of(outputs["a"]) == tokens[len(PROMPTS[2]) :]


def test_stop_ids_are_blocked_until_min_tokens(tiny_model, generate):
    free = greedy_reference(tiny_model, PROMPTS[2], 6)
    params = SamplingParams(
        temperature=0, max_tokens=6, min_tokens=3, seed=0, stop_token_ids=tuple(set(free))
    )
    tokens = list(PROMPTS[2])
    for i in range(6):
        logits = tiny_model.last_logits(tokens)
        if i < 3:
            logits[list(set(free))] = -np.inf
        tokens.append(int(logits.argmax()))
        if i >= 3 and tokens[-1] in free:
            break
    outputs = generate({"a": (PROMPTS[2], params)}, depth=2)
    assert tokens_of(outputs["a"]) == tokens[len(PROMPTS[2]) :]


@pytest.mark.parametrize("depth", [1, 2])
def test_biases_allowed_tokens_and_bad_words_equal_a_reference_loop(tiny_model, generate, depth):
    prompt = PROMPTS[2]
    free = greedy_reference(tiny_model, prompt, 24)
    allowed = tuple({*free, *range(0, VOCAB, 2)})
    words = ((free[2],), tuple(free[4:6]), tuple(free[7:10]), tuple(free[8:14]), (1, 2, 3))
    params = SamplingParams(
        temperature=0, seed=0, max_tokens=24, logit_bias={free[0]: -150.0, 3: 1.5},
        allowed_token_ids=allowed, bad_words_token_ids=words,
    )  # fmt: skip
    expected = []
    for _ in range(24):
        logits = tiny_model.last_logits([*prompt, *expected])
        logits[[i for i in range(VOCAB) if i not in allowed]] = -np.inf
        for *start, last in words:
            if expected[len(expected) - len(start) :] == start:
                logits[last] = -np.inf
        logits[free[0]] -= 100
        logits[3] += 1.5
        expected.append(int(logits.argmax()))
    assert expected != free
    plain = SamplingParams(temperature=0, seed=0, max_tokens=24)
    outputs = generate({"a": (prompt, params), "b": (prompt, plain)}, depth=depth)
    assert tokens_of(outputs["a"]) == expected
    assert tokens_of(outputs["b"]) == free


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_logprobs_equal_the_reference(tiny_model, generate, variant):
    asked = [3, 0, 20, None, 1, 5, None, 2]
    requests = {
        str(i): (
            prompt,
            SamplingParams(temperature=0, max_tokens=6, seed=0, prompt_logprobs=k, logprobs=1),
        )
        for i, (prompt, k) in enumerate(zip(PROMPTS, asked, strict=True))
    }
    outputs = generate(requests, **VARIANTS[variant])
    for (prompt, params), request_outputs in zip(requests.values(), outputs.values(), strict=True):
        assert all(output.prompt_logprobs is None for output in request_outputs[1:])
        found = request_outputs[0].prompt_logprobs
        if params.prompt_logprobs is None:
            assert found is None
            continue
        assert len(found) == len(prompt)
        assert found[0] is None
        for i, entry in enumerate(found[1:], 1):
            logits = tiny_model.last_logits(prompt[:i]).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logits)[: params.prompt_logprobs].tolist()
            assert entry.token_ids == (prompt[i], *best)
            atol = tiny_model.tolerance(i, of="logits")
            np.testing.assert_allclose(
                entry.logprobs, expected[list(entry.token_ids)], rtol=0, atol=atol
            )
            assert entry.rank == 1 + (logits > logits[prompt[i]]).sum()
            if prompt[i] in best:
                assert entry.logprobs[0] == entry.logprobs[1 + best.index(prompt[i])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_vectors_of_prompts_equal_the_reference(tiny_model, generate, variant):
    """Requests that generate run beside them, and more or fewer than fit one pooling program."""
    requests = {str(i): (prompt, GREEDY) for i, prompt in enumerate(PROMPTS)}
    for pooling in ("last", "mean"):
        params = SamplingParams(temperature=0, seed=0, pooling=pooling)
        requests |= {f"{pooling} {i}": (prompt, params) for i, prompt in enumerate(PROMPTS)}
    outputs = generate(requests, **VARIANTS[variant])
    for i, prompt in enumerate(PROMPTS):
        final = np.asarray(tiny_model.final(tiny_model.hidden(prompt)))
        for pooling, expected in (("last", final[-1]), ("mean", final.mean(0))):
            (output,) = outputs[f"{pooling} {i}"]
            atol = tiny_model.tolerance(len(prompt), of="final")
            assert output.token_ids == []
            assert output.finish_reason == FinishReason.STOP
            np.testing.assert_allclose(output.embedding, expected, rtol=0, atol=atol)
        assert tokens_of(outputs[str(i)]) == greedy_reference(tiny_model, prompt, 12)


def test_a_resubmitted_request_gets_no_prompt_logprobs_again(generate, runner):
    params = SamplingParams(temperature=0, max_tokens=6, seed=0, prompt_logprobs=2)
    whole = generate({"a": (PROMPTS[2], params)})["a"]
    assert whole[0].prompt_logprobs is not None
    prompt = PROMPTS[2] + tokens_of(whole)[:2]
    core = EngineCore(
        Scheduler(
            max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, num_blocks=257,
            block_size=4,
        ),
        runner,
        depth=1,
    )  # fmt: skip
    core.add(Submit("a", prompt, params, num_prior_tokens=2))
    outputs = []
    while core.has_work:
        outputs += core.step(0.0)
    assert tokens_of(outputs) == tokens_of(whole)[2:]
    assert all(output.prompt_logprobs is None for output in outputs)


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_equal_the_reference(tiny_model, generate, depth):
    asked = SamplingParams(temperature=0.8, max_tokens=5, seed=1, logprobs=3)
    plain = SamplingParams(temperature=0.8, max_tokens=5, seed=1)
    outputs = generate({"a": (PROMPTS[2], asked), "b": (PROMPTS[2], plain)}, depth=depth)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"])
    assert all(output.logprobs is None for output in outputs["b"])
    tokens = list(PROMPTS[2])
    for output in outputs["a"]:
        (entry,) = output.logprobs
        logits = tiny_model.last_logits(tokens).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.token_ids == (*output.token_ids, *np.argsort(-logits)[:3].tolist())
        atol = tiny_model.tolerance(len(tokens), of="logits")
        np.testing.assert_allclose(
            entry.logprobs, expected[list(entry.token_ids)], rtol=0, atol=atol
        )
        assert entry.rank == 1 + (logits > logits[entry.token_ids[0]]).sum()
        tokens += output.token_ids


def test_nothing_is_compiled_after_warm_up(runner, generate, caplog):
    programs = []
    runner.warm_up(lambda done, total, name: programs.append((done, total, name)))
    assert [done for done, _, _ in programs] == list(range(len(programs)))
    assert {total for _, total, _ in programs} == {len(programs) - 1}
    before = runner.num_compilations
    rng = np.random.default_rng(9)
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 7},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 0, "logprobs": 20},
        {"temperature": 1.2, "prompt_logprobs": 3},
        {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(0, VOCAB, 2))},
    ]
    for depth, num_requests, budget in itertools.product((1, 2), (1, 3, 11), (8, 32)):
        requests = {
            str(i): (
                rng.integers(0, VOCAB, rng.integers(1, 60)).tolist(),
                SamplingParams(
                    **kinds[rng.integers(len(kinds))], seed=i, max_tokens=int(rng.integers(1, 20))
                ),
            )
            for i in range(num_requests)
        }
        with caplog.at_level(logging.WARNING, "jaxserve"):
            generate(requests, depth=depth, max_num_batched_tokens=budget)
    assert runner.num_compilations == before
    assert not caplog.records


def test_a_program_that_was_not_warmed_up_is_counted_and_logged_once(runner, generate, caplog):
    before = runner.num_compilations
    params = SamplingParams(temperature=1, top_k=100, max_tokens=4, seed=0, logprobs=20)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        first = generate({"a": (PROMPTS[0], params)})
        added = runner.num_compilations - before
        assert added > 0
        assert len(caplog.records) == added
        assert tokens_of(generate({"a": (PROMPTS[0], params)})["a"]) == tokens_of(first["a"])
    assert len(caplog.records) == added


def test_padding_does_not_change_tokens_or_slots(runner):
    """An empty step of any shape changes nothing that a request could read."""
    runner._state = runner._state.__class__(runner._state.kv, jnp.arange(4, dtype=jnp.int32) + 100)
    before = np.asarray(runner._state.kv.k).copy()
    runner.warm_up(lambda *_: None)
    np.testing.assert_array_equal(runner._state.last_tokens, np.arange(4) + 100)
    np.testing.assert_array_equal(runner._state.kv.k, before)

"""Tokens and log probabilities of rows with every parameter, compared with numpy."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import ScheduledRequest, StepPlan, StepResult
from jaxserve.runner.jit import CompilationLog
from jaxserve.runner.pending import PendingStep
from jaxserve.runner.sampler_warm_ups import SamplerWarmUps
from jaxserve.runner.token_sampler import TokenSampler
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.tolerance import rounding

V, S = 500, 16
MODES = get_args(LogprobsMode)


@pytest.fixture(scope="module", params=MODES)
def sampler(request) -> TokenSampler:
    """Returns one sampler per mode, shared by all tests so that it is compiled once."""
    sampler = TokenSampler(
        num_rows=S, vocab_size=V, logprobs_mode=request.param, log=CompilationLog()
    )
    sampler.mode = request.param  # type: ignore[attr-defined]
    return sampler


class Fixed:
    """A constraint that always allows the same tokens."""

    error = None

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def fill_mask(self, mask: np.ndarray) -> None:
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[self.ids] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<u4")

    def accept(self, token_id: int) -> None:
        raise NotImplementedError


def part(row: int, params: SamplingParams, tokens: list[int], constraint=None) -> ScheduledRequest:
    params = params.normalised()
    return ScheduledRequest(
        request_id=str(row), row=row, is_new=True, start=len(tokens) - 1, num_tokens=1,
        token_ids=[], table_updates=(), samples=True, params=params,
        eos_token_id=None, num_prompt_tokens=3, known_token_ids=tokens, constraint=constraint,
    )  # fmt: skip


def run(sampler: TokenSampler, logits: np.ndarray, parts: list[ScheduledRequest]) -> StepResult:
    plan = StepPlan(0, tuple(parts))
    for each in parts:
        sampler.admit(each)
    needs = sampler.needs(plan)
    best = jnp.asarray(logits.argmax(-1), jnp.int32)
    last_tokens = jnp.full(sampler.num_rows, -1, jnp.int32)
    # The step itself has stored the tokens of the rows that the sampler does not fill.
    for i, each in enumerate(parts):
        if i not in needs.to_sample:
            last_tokens = last_tokens.at[each.row].set(best[i])
    work = sampler.gather(plan, needs, jnp.asarray(logits))
    last_tokens, sampled = sampler.finish(work, last_tokens)
    step = PendingStep(plan, best, work, lambda _: sampled, scores=None, pooled=None)
    step.sample()
    result = step.result()
    kept = np.asarray(last_tokens)
    assert [[kept[each.row]] for each in parts] == list(result.token_ids)
    assert (np.delete(kept, [each.row for each in parts]) == -1).all()
    return result


def processed(logits: np.ndarray, part: ScheduledRequest) -> np.ndarray:
    """Applies masks, bad words, biases and penalties, token by token."""
    params, changed = part.params, logits.astype(np.float64)
    tokens = list(part.known_token_ids)
    output = tokens[part.num_prompt_tokens :]
    allowed = params.allowed_token_ids if part.constraint is None else part.constraint.ids  # type: ignore[attr-defined]
    if allowed is not None:
        changed[np.setdiff1d(np.arange(V), allowed)] = -np.inf
    blocked = changed.copy()
    for (word,) in params.bad_words_token_ids:
        blocked[word] = -np.inf
    if blocked.max() > -np.inf:  # otherwise a bad word must be taken
        changed = blocked
    for token, value in (params.logit_bias or {}).items():
        changed[token] += value
    for token in set(tokens):
        value, penalty = changed[token], params.repetition_penalty
        value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * output.count(token)
        changed[token] = value - params.presence_penalty * (token in output)
    return changed


def filtered(changed: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Applies temperature, min_p, top_k and top_p, by sorting."""
    if params.is_greedy:
        return changed
    changed = changed / params.temperature
    if params.min_p:
        changed = np.where(changed < changed.max() + np.log(params.min_p), -np.inf, changed)
    if 0 < params.top_k < V:
        changed = np.where(changed < np.sort(changed)[-params.top_k], -np.inf, changed)
    odds = np.exp(changed - changed.max())
    above = np.array([odds[changed > value].sum() for value in changed])
    return (
        np.where(above >= params.top_p * odds.sum(), -np.inf, changed)
        if params.top_p < 1
        else changed
    )


def expected_numbers(mode: str, logits: np.ndarray, part: ScheduledRequest) -> np.ndarray:
    values = logits.astype(np.float64)
    if mode.startswith("processed"):
        values = filtered(processed(logits, part), part.params)
    if mode.endswith("logprobs"):
        values = values - np.log(np.exp(values - values.max()).sum()) - values.max()
    return values


def random_part(rng: np.random.Generator, row: int) -> ScheduledRequest:
    """Returns a part in which each parameter is set with probability one half."""

    def maybe(**fields: object) -> dict[str, object]:
        return {name: value for name, value in fields.items() if rng.random() < 0.5}

    ids = rng.permutation(V)
    asked = maybe(
        temperature=float(rng.choice([0.3, 1.0, 2.0])), top_k=int(rng.choice([2, 30, 100])),
        top_p=float(rng.choice([0.3, 0.95])), min_p=0.02, repetition_penalty=1.3,
        frequency_penalty=0.4, presence_penalty=-0.7,
        logit_bias={int(i): float(rng.normal() * 3) for i in ids[:20]},
        bad_words_token_ids=tuple((int(i),) for i in ids[10:40]),
        logprobs=int(rng.choice([0, 1, 20, 30])),
    )  # fmt: skip
    constraint = None
    if rng.random() < 0.5:
        asked["allowed_token_ids"] = tuple(ids[30 : 30 + rng.integers(5, 200)].tolist())
    elif rng.random() < 0.3:
        constraint = Fixed(ids[30 : 30 + rng.integers(5, 200)].tolist())
    params = SamplingParams(**{"temperature": 0.0, "seed": row, **asked})  # type: ignore[arg-type]
    return part(row, params, rng.integers(0, V, rng.integers(3, 40)).tolist(), constraint)


def tolerance(numbers: np.ndarray) -> float:
    """Returns the largest difference allowed between two float32 evaluations of these numbers.

    The relative error of the sum over the vocabulary is an absolute error of its logarithm.
    Temperature, penalties, bias and the difference round the number itself up to eight times.
    """
    largest = np.abs(numbers[np.isfinite(numbers)]).max()
    return rounding("float32", V) + rounding("float32", 8, scale=largest)


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 4), (2, 9), (3, 16), (4, 16), (5, 16)])
def test_all_parameters_together_equal_numpy(sampler, seed, count):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(S, V)) * 3).astype(np.float32)
    rows = rng.permutation(S)[:count].tolist()
    parts = [random_part(rng, row) for row in rows]
    result = run(sampler, logits, parts)
    for i, each in enumerate(parts):
        (token,), params = result.token_ids[i], each.params
        choices = filtered(processed(logits[i], each), params)
        assert choices[token] > -np.inf
        if params.is_greedy:
            assert token == choices.argmax()
        entries = (result.logprobs or [None] * count)[i]
        assert (entries is None) == (params.logprobs is None)
        if entries is None:
            continue
        (entry,) = entries
        numbers = expected_numbers(sampler.mode, logits[i], each)
        ids = np.array(entry.token_ids)
        assert ids[0] == token
        atol = tolerance(numbers)
        np.testing.assert_allclose(entry.logprobs, numbers[ids], rtol=0, atol=atol)
        # Tokens left out are not more likely. Among removed tokens the lowest IDs come first.
        assert len(set(ids[1:])) == len(ids) - 1 == params.logprobs
        assert list(entry.logprobs[1:]) == sorted(entry.logprobs[1:], reverse=True)
        others = np.delete(numbers, ids[1:])
        if params.logprobs:
            assert numbers[ids[-1]] >= others.max() - atol
        assert entry.rank == 1 + (numbers > numbers[token] + 1e-9).sum()


def test_logprobs_do_not_depend_on_other_rows(sampler):
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=(S, V)) * 3).astype(np.float32)
    parts = [random_part(rng, row) for row in range(S)]
    together = run(sampler, logits, parts)
    for i in rng.permutation(S)[:6]:
        alone = run(sampler, logits[i : i + 1], [parts[i]])
        assert alone.token_ids[0] == together.token_ids[i]
        if parts[i].params.logprobs is not None:
            assert alone.logprobs is not None
            assert together.logprobs is not None
            one, other = alone.logprobs[0], together.logprobs[i]
            assert one is not None
            assert other is not None
            (one,), (other,) = one, other
            assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
            atol = tolerance(np.array(one.logprobs))
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


def test_greedy_requests_without_logprobs_run_no_program():
    log = CompilationLog()
    sampler = TokenSampler(num_rows=S, vocab_size=V, logprobs_mode="raw_logprobs", log=log)
    plain = [part(row, SamplingParams(temperature=0, seed=0), [1, 2, 3]) for row in range(8)]
    logits = np.random.default_rng(0).normal(size=(8, V)).astype(np.float32)
    assert run(sampler, logits, plain).logprobs is None
    assert log.programs == []
    asking = part(9, SamplingParams(temperature=0, seed=0, logprobs=3), [1, 2, 3])
    run(sampler, np.concatenate([logits, logits[:1]]), [*plain, asking])
    assert log.programs == [
        "gathering rows of logits: 4 of 9 rows",
        "log probabilities: 4 rows, 20 most likely tokens",
    ]


@pytest.mark.usefixtures("compile_quickly")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_only_rare_parameters_are_compiled_after_warm_up(mode, caplog):
    log = CompilationLog()
    sampler = TokenSampler(num_rows=6, vocab_size=V, logprobs_mode=mode, log=log)
    with log.expected():
        warm_ups = list(SamplerWarmUps(sampler).programs([2, 6]))
        for i, (_, compile_one) in enumerate(warm_ups):
            jax.block_until_ready(compile_one())
            assert len(log.programs) == i + 1
    assert not caplog.records
    rng = np.random.default_rng(3)
    rare = {"top_k", "logprobs"}
    for num_rows, count in [(2, 1), (2, 2), (6, 1), (6, 5), (6, 6)]:
        parts = [random_part(rng, row) for row in range(count)]
        for each in parts:
            asked = {
                f: getattr(each.params, f) for f in each.params.__struct_fields__ if f not in rare
            }
            common = SamplingParams(**asked, top_k=7, logprobs=5)
            parts[each.row] = part(each.row, common, list(each.known_token_ids), each.constraint)
        run(sampler, rng.normal(size=(num_rows, V)).astype(np.float32), parts)
    assert len(log.programs) == len(warm_ups)
    large = part(0, SamplingParams(seed=0, top_k=100), [1])
    run(sampler, rng.normal(size=(2, V)).astype(np.float32), [large])
    (record,) = caplog.records
    assert "sampling tokens: 4 rows, filters, large top_k" in record.getMessage()
    bias = dict.fromkeys(range(V), 1.0)
    lists = [part(i, SamplingParams(temperature=0, seed=0, logit_bias=bias), [1]) for i in range(3)]
    run(sampler, rng.normal(size=(6, V)).astype(np.float32), lists)
    assert "lists of 4096 tokens" in caplog.records[-1].getMessage()

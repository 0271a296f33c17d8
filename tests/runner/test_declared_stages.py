"""Declared stages in the sampler: their order, isolation of rows, and programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.runner.declared_stages import DeclaredStages
from jaxserve.runner.jit import CompilationLog
from jaxserve.runner.pending import PendingStep
from jaxserve.runner.sampler_warm_ups import SamplerWarmUps
from jaxserve.runner.token_sampler import TokenSampler
from jaxserve.sampling.declaration import ALL_TOKENS, Stage
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.example_stages import STAGES
from jaxserve.testing.tolerance import rounding

V, S = 500, 16


def make_sampler(log: CompilationLog, stages: Sequence[Stage] = STAGES, mode="processed_logits"):
    declared = DeclaredStages(stages, max_model_len=2000, log=log)
    return TokenSampler(num_rows=S, vocab_size=V, logprobs_mode=mode, log=log, stages=declared)


@pytest.fixture(scope="module")
def sampler() -> TokenSampler:
    return make_sampler(CompilationLog())


def part(row: int, tokens: Sequence[int], *, unknown: int = 0, **params: Any) -> ScheduledRequest:
    asked = SamplingParams(**{"temperature": 0.0, "seed": row, "logprobs": 20, **params})
    return ScheduledRequest(
        request_id=str(row), row=row, is_new=True, start=len(tokens) + unknown - 1, num_tokens=1,
        token_ids=[], table_updates=(), samples=True, params=asked.normalised(),
        eos_token_id=None, num_prompt_tokens=3, known_token_ids=list(tokens),
        num_unknown_tokens=unknown,
    )  # fmt: skip


class Result(NamedTuple):
    """The token of each part, and its log probabilities."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


def run(
    sampler: TokenSampler, logits: np.ndarray, parts: Sequence[ScheduledRequest], last: int = -1
) -> Result:
    """Samples from logits [R, V]. ``last`` is the last token of every engine row."""
    plan = StepPlan(0, tuple(parts))
    for each in parts:
        sampler.admit(each)
    best = jnp.asarray(logits.argmax(-1), jnp.int32)
    work = sampler.gather(plan, sampler.needs(plan), jnp.asarray(logits))
    _, sampled = sampler.finish(work, jnp.full(S, last, jnp.int32))
    step = PendingStep(plan, best, work, lambda _: sampled, scores=None, pooled=None)
    step.sample()
    result = step.result()
    logprobs = None if result.logprobs is None else [each and each[0] for each in result.logprobs]
    return Result([token_id for (token_id,) in result.token_ids], logprobs)


def make_logits(count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(count, V)) * 3).astype(np.float32)


def expected_logits(logits: np.ndarray, part: ScheduledRequest) -> np.ndarray:
    """Applies all stages in vLLM's order, token by token, in float64."""
    params, extra = part.params, part.params.extra_args or {}
    tokens = list(part.known_token_ids)
    output = tokens[part.num_prompt_tokens :]
    values = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        values[np.setdiff1d(np.arange(V), params.allowed_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    values *= extra.get("factor", 1.0)
    values[tokens[-4:]] -= extra.get("lower", 0.0)
    if extra.get("once"):
        values[output] = -np.inf
    for token in set(tokens):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.frequency_penalty * output.count(token)
    if params.is_greedy:
        return values
    values /= params.temperature
    if params.min_p:
        values[values < values.max() + np.log(params.min_p)] = -np.inf
    if extra.get("top_n_sigma"):
        deviation = values[np.isfinite(values)].std()
        values[values < values.max() - extra["top_n_sigma"] * deviation] = -np.inf
    if params.top_k:
        values[values < np.sort(values)[-params.top_k]] = -np.inf
    return values


def random_part(rng: np.random.Generator, row: int) -> ScheduledRequest:
    """Returns a part in which each parameter is set with probability one half."""

    def maybe(**fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if rng.random() < 0.5}

    ids = rng.permutation(V)
    extra = maybe(
        factor=float(rng.uniform(0.3, 2)), lower=float(rng.uniform(-5, 5)), once=True,
        top_n_sigma=float(rng.uniform(0.5, 1.5)),
    )  # fmt: skip
    asked = maybe(
        temperature=float(rng.choice([0.5, 1.5])), min_p=0.02, top_k=int(rng.choice([3, 30])),
        logit_bias={int(i): float(rng.normal() * 3) for i in ids[:20]},
        allowed_token_ids=tuple(ids[10:300].tolist()),
        repetition_penalty=1.4, frequency_penalty=0.4,
    )  # fmt: skip
    # Tokens of a small set, so that they repeat.
    tokens = rng.choice(ids[:40], rng.integers(3, 60)).tolist()
    return part(row, tokens, extra_args=extra or None, **asked)


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 3), (2, 7), (3, 16), (4, 16)])
def test_stages_run_in_the_order_of_vllm(sampler, seed, count):
    rng = np.random.default_rng(seed)
    logits = make_logits(count, seed)
    parts = [random_part(rng, row) for row in rng.permutation(S)[:count].tolist()]
    result = run(sampler, logits, parts)
    assert result.logprobs is not None
    for i, each in enumerate(parts):
        expected = expected_logits(logits[i], each)
        entry = result.logprobs[i]
        assert entry is not None
        assert expected[result.token_ids[i]] > -np.inf
        if each.params.is_greedy:
            assert result.token_ids[i] == expected.argmax()
        # At most ten factors and sums per logit.
        largest = np.abs(expected[np.isfinite(expected)]).max()
        atol = rounding("float32", 10, scale=max(largest, 20))
        best = np.sort(expected)[::-1][:20]
        np.testing.assert_allclose(entry.logprobs[1:], best, rtol=0, atol=atol)
        np.testing.assert_allclose(
            entry.logprobs, expected[np.array(entry.token_ids)], rtol=0, atol=atol
        )


def test_requests_with_other_values_do_not_change_a_request(sampler):
    """Bit by bit: these stages have no sums, whose order depends on the number of rows."""
    rng = np.random.default_rng(9)
    logits = make_logits(S)
    parts = []
    for row in range(S):
        extra = {"factor": 0.5 + row / 8, "lower": float(row % 3), "drop": 0.2 * (row % 4)}
        tokens = rng.integers(0, V, 5 + row).tolist()
        parts.append(part(row, tokens, temperature=float(row % 2), extra_args=extra))
    together = run(sampler, logits, parts)
    for i in range(S):
        alone = run(sampler, logits[i : i + 1], [parts[i]])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs is not None
        assert together.logprobs is not None
        assert alone.logprobs[0] == together.logprobs[i]


def test_a_stage_sees_a_token_that_the_host_does_not_know_yet(sampler):
    logits = make_logits(3)
    best, second = np.argsort(logits, axis=-1)[:, ::-1][:, :2].T
    extra = {"lower": 1000.0, "once": True}
    # The newest token, on the device only, is the most likely one of the first row.
    parts = [part(row, [1, 2, 3, 4], unknown=1, extra_args=extra) for row in range(3)]
    result = run(sampler, logits, parts, last=int(best[0]))
    assert result.token_ids[0] == second[0]
    assert result.token_ids[1:] == best[1:].tolist()
    # Four tokens from the end, after the newest one: the first of these is out of sight.
    known = [int(best[0]), 1, 2, 3]
    extra = {"lower": 1000.0}
    seen, unseen = (
        run(sampler, logits[:1], [part(0, known, unknown=unknown, extra_args=extra)], last=5)
        for unknown in (0, 1)
    )
    assert (seen.token_ids[0], unseen.token_ids[0]) == (second[0], best[0])


def test_draws_of_a_random_stage_do_not_repeat(sampler):
    """Each token but the best is kept with probability 0.3, independently at each position."""
    extra = {"drop": 0.7}
    logits = np.zeros((S, V), np.float32)
    logits[:, 0] = 1e-6
    kept = []
    for length in range(4, 24):
        parts = [
            part(row, [1] * length, temperature=1.0, logprobs=V - 1, extra_args=extra)
            for row in range(S)
        ]
        result = run(sampler, logits, parts)
        assert result.logprobs is not None
        for entry in result.logprobs:
            assert entry is not None
            allowed = np.array(entry.token_ids[1:])[np.isfinite(entry.logprobs[1:])]
            kept.append(np.isin(np.arange(1, V), allowed))
    fraction = np.mean(kept)
    deviation = (0.3 * 0.7 / np.size(kept)) ** 0.5
    assert abs(fraction - 0.3) < 5 * deviation
    # Two independent sets of 0.3 V tokens have 0.09 V in common.
    common = [np.mean(a & b) for a, b in zip(kept, kept[1:], strict=False)]
    assert abs(np.mean(common) - 0.09) < 0.01
    assert max(common) < 0.2


def test_an_unused_stage_runs_no_program():
    log = CompilationLog()
    sampler = make_sampler(log, mode="raw_logprobs")
    logits = make_logits(2)
    off = {"factor": 1.0, "once": False}
    parts = [part(0, [1, 2, 3], logprobs=None), part(1, [1, 2], logprobs=None, extra_args=off)]
    # A filter does nothing for a greedy request.
    parts[0] = part(0, [1, 2, 3], logprobs=None, extra_args={"drop": 0.5})
    run(sampler, logits, parts)
    assert log.programs == []
    run(sampler, logits, [part(0, [1, 2, 3], logprobs=None, extra_args={"once": True})])
    assert log.programs == [
        "gathering rows of logits: 4 of 2 rows",
        "stage once: 4 rows, 256 tokens",
        "sampling tokens: 4 rows, no filters",
    ]


@pytest.mark.usefixtures("compile_quickly")
def test_programs_are_compiled_at_warm_up(caplog):
    log = CompilationLog()
    sampler = make_sampler(log)
    with log.expected():
        for _, compile_one in SamplerWarmUps(sampler).programs([4]):
            jax.block_until_ready(compile_one())
    names = [program for program in log.programs if "stage" in program and "4 rows" in program]
    assert names == [
        "stage scale: 4 rows",
        "stage lower: 4 rows, 4 tokens",
        "stage once: 4 rows, 256 tokens",
        "stage once: 4 rows, 1024 tokens",
        "stage once: 4 rows, 2000 tokens",
        "stage drop: 4 rows",
    ]
    before = len(log.programs)
    rng = np.random.default_rng(3)
    for length in (5, 300, 1999):
        extra = {"factor": 2.0, "lower": 1.0, "once": True, "drop": 0.5}
        parts = [
            part(row, rng.integers(0, V, length).tolist(), temperature=1.0, extra_args=extra)
            for row in range(4)
        ]
        for count in (1, 4):
            run(sampler, make_logits(4)[:4], parts[:count] + [part(9, [1])] * (4 - count))
    assert len(log.programs) == before
    rare = part(0, [1, 2], temperature=1.0, extra_args={"top_n_sigma": 1.0})
    run(sampler, make_logits(4), [rare, *(part(9, [1]) for _ in range(3))])
    (record,) = caplog.records
    assert "stage top_n_sigma: 4 rows" in record.getMessage()


@pytest.mark.usefixtures("compile_quickly")
def test_warnings_about_compilations_name_the_stages_that_need_them(caplog):
    sampler = make_sampler(CompilationLog(), mode="raw_logprobs")
    extra = {"top_n_sigma": 1.0, "drop": 0.5}
    run(sampler, make_logits(1), [part(0, [1], temperature=1.0, logprobs=None, extra_args=extra)])
    compiled = [record.getMessage().partition("): ")[2] for record in caplog.records]
    assert compiled == [
        "gathering rows of logits: 4 of 1 rows",
        "temperature and min_p before filters: 4 rows, for top_n_sigma and drop",
        "stage top_n_sigma: 4 rows",
        "stage drop: 4 rows",
        "sampling tokens: 4 rows, no filters",
    ]


def test_a_stage_is_refused_that_fails_on_one_of_the_shapes_of_its_programs():
    """The sampler has 4 or 16 rows, and the stage 256, 1024 or 2000 tokens."""
    log = CompilationLog()
    seen = []

    def apply(logits, rows):
        seen.append((len(logits), rows.tokens.shape[1]))
        return logits[:4, : V - rows.tokens.shape[1] // 2000]

    stage = Stage(name="late", apply=apply, num_tokens=ALL_TOKENS)
    got = rf"float32\[4, {V - 1}\]"
    with pytest.raises(ConfigError, match=rf"stage late must return logits .*, got {got}"):
        make_sampler(log, [stage])
    assert seen == [(4, 256), (4, 1024), (4, 2000)]
    few = Stage(name="few", apply=lambda logits, rows: logits[:4])
    with pytest.raises(ConfigError, match=rf"stage few must .* float32\[{S}, {V}\], got"):
        make_sampler(log, [few])
    assert log.programs == []

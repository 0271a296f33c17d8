"""Sampling batches: the needs of a step, and the arrays of the rows to sample."""

import dataclasses

import msgspec
import numpy as np
import pytest

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.sampling_batch import SamplingBatchBuilder, SamplingNeeds
from jaxserve.sampling.inputs import SMALL_TOP_K, Filters
from jaxserve.sampling.logprobs import logprobs_size
from jaxserve.sampling_params import SamplingParams

V, S = 100, 6


def part(row=0, *, known=(1, 2, 3), num_prompt=3, unknown=0, samples=True, eos=None, **params):
    params = SamplingParams(**{"seed": 0, "temperature": 0, **params}).normalised()
    return ScheduledRequest(
        request_id=str(row), row=row, is_new=True, start=len(known) + unknown - 1, num_tokens=1,
        token_ids=[], table_updates=(), samples=samples, params=params,
        eos_token_id=eos, num_prompt_tokens=num_prompt, known_token_ids=list(known),
        num_unknown_tokens=unknown,
    )  # fmt: skip


def build_parts(*parts, num_rows=4, builder=None):
    builder = builder or SamplingBatchBuilder(num_rows=S, vocab_size=V)
    for each in parts:
        if each.is_new:
            builder.admit(each)
    plan = StepPlan(0, parts)
    needs = builder.needs(plan)
    return needs, builder.build(plan, needs, num_rows)


def scored(count):
    """The needs of a request for this many log probabilities."""
    return SamplingNeeds(to_score=(0,), num_logprobs=logprobs_size(count, V))


PLAIN = SamplingNeeds(num_logprobs=logprobs_size(0, V))
TO_SAMPLE = dataclasses.replace(PLAIN, to_sample=(0,))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PLAIN),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, PLAIN),
        ({"temperature": 1}, TO_SAMPLE),
        ({"temperature": 1, "top_k": V}, TO_SAMPLE),
        ({"temperature": 1, "top_k": -1}, TO_SAMPLE),
        (
            {"temperature": 1, "top_k": SMALL_TOP_K},
            dataclasses.replace(TO_SAMPLE, filters=Filters.SMALL_TOP_K),
        ),
        (
            {"temperature": 1, "top_p": 0.9},
            dataclasses.replace(TO_SAMPLE, filters=Filters.SMALL_TOP_K),
        ),
        (
            {"temperature": 1, "min_p": 0.1},
            dataclasses.replace(TO_SAMPLE, filters=Filters.SMALL_TOP_K),
        ),
        (
            {"temperature": 1, "top_k": SMALL_TOP_K + 1},
            dataclasses.replace(TO_SAMPLE, filters=Filters.LARGE_TOP_K),
        ),
        ({"presence_penalty": 1}, dataclasses.replace(TO_SAMPLE, has_token_lists=True)),
        *(({"logprobs": count}, scored(count)) for count in (0, 1, 20, 21, V - 1, V)),
        ({"min_tokens": 1}, PLAIN),
        ({"min_tokens": 1, "eos": 5}, dataclasses.replace(TO_SAMPLE, has_token_lists=True)),
        ({"min_tokens": 0, "eos": 5}, PLAIN),
        ({"logit_bias": {}}, PLAIN),
        ({"logit_bias": {3: 1.0}}, dataclasses.replace(TO_SAMPLE, has_token_lists=True)),
        ({"allowed_token_ids": (3,)}, dataclasses.replace(TO_SAMPLE, has_masks=True)),
        ({"bad_words_token_ids": ((3, 4),)}, dataclasses.replace(TO_SAMPLE, has_token_lists=True)),
    ],
)
def test_needs_follow_from_the_parameters(params, expected):
    needs, _ = build_parts(part(**params))
    assert needs == expected


def test_only_requests_that_need_the_sampler_get_a_row():
    needs, rows = build_parts(
        part(samples=False, temperature=1, logprobs=3), part(2), part(4, temperature=1),
        part(1, logprobs=3), part(3, logit_bias={2: 1.0}, logprobs=1),
    )  # fmt: skip
    assert needs == SamplingNeeds(
        (2, 4), (3, 4), num_logprobs=logprobs_size(3, V), has_token_lists=True
    )
    assert rows.kept_in_row.tolist() == [4, 3, S, S]


def test_builds_the_arrays_of_rows():
    _, rows = build_parts(
        part(5, known=(1, 2, 3, 4), seed=-1, temperature=0.001, top_k=7, top_p=0.5, min_p=0.25),
        part(2, known=(1, 2), num_prompt=2, seed=2**40 + 3, repetition_penalty=1.5,
             frequency_penalty=-1, presence_penalty=0.5),
    )  # fmt: skip
    assert rows.kept_in_row.tolist() == [5, 2, S, S]
    assert rows.positions.tolist() == [4, 2, 0, 0]
    assert rows.seeds.tolist() == [[2**32 - 1, 2**32 - 1], [3, 256], [0, 0], [0, 0]]
    assert rows.temperature.tolist() == pytest.approx([0.01, 0, 0, 0])
    assert rows.top_k.tolist() == [7, V, V, V]
    assert rows.top_p.tolist() == [0.5, 1, 1, 1]
    assert rows.min_p.tolist() == [0.25, 0, 0, 0]
    assert rows.repetition.tolist() == [1, 1.5, 1, 1]
    assert rows.frequency.tolist() == [0, -1, 0, 0]
    assert rows.presence.tolist() == [0, 0.5, 0, 0]


def entries(rows, num_rows: int) -> list[tuple[int, ...]]:
    fields = [rows.rows, rows.ids, *([rows.counts] if hasattr(rows, "counts") else [])]
    return sorted(e for e in zip(*(f.tolist() for f in fields), strict=True) if e[0] < num_rows)


def test_stop_ids_are_blocked_until_min_tokens():
    # Three output tokens are known, and the fourth is to be sampled.
    def with_min_tokens(min_tokens: int, row: int) -> ScheduledRequest:
        return part(row, known=range(10, 16), num_prompt=3, eos=9, stop_token_ids=(4, 5),
                    min_tokens=min_tokens)  # fmt: skip

    _, rows = build_parts(with_min_tokens(4, 0), with_min_tokens(3, 1), with_min_tokens(0, 2))
    assert entries(rows.blocked, 4) == [(0, 4), (0, 5), (0, 9)]


def test_biases_are_limited_and_cleared_when_the_row_is_reused():
    builder = SamplingBatchBuilder(num_rows=S, vocab_size=V)
    _, rows = build_parts(
        part(2, temperature=1), part(4, logit_bias={7: 0.5, 99: 1e30, 0: -101.0}), builder=builder
    )  # fmt: skip
    found = zip(
        *(f.tolist() for f in (rows.biased.rows, rows.biased.ids, rows.biased.values)), strict=True
    )
    assert sorted(e for e in found if e[0] < 4) == [(1, 0, -100.0), (1, 7, 0.5), (1, 99, 100.0)]
    needs, rows = build_parts(part(4), builder=builder)
    assert needs == PLAIN
    assert rows.biased is None


def allowed(rows, i: int) -> list[int]:
    return [t for t in range(V) if int(rows.mask[i, t // 32]) >> (t % 32) & 1]


def test_masks_hold_the_allowed_tokens_and_other_rows_allow_all():
    ids = (0, 31, 32, 63, 99)
    _, rows = build_parts(part(3, temperature=1), part(1, allowed_token_ids=ids))
    assert rows.mask.shape == (4, 4)
    assert allowed(rows, 1) == list(ids)
    assert allowed(rows, 0) == allowed(rows, 3) == list(range(V))


WORDS = ((9,), (1, 2), (3, 1, 4), (5, 3, 1, 6))


@pytest.mark.parametrize(
    ("known", "num_prompt", "unknown", "expected"),
    [
        ((3, 1), 2, 0, {(9, -1, 0)}),  # the prompt does not count
        ((3, 1), 0, 0, {(9, -1, 0), (2, -1, 0), (4, -1, 0)}),
        ((5, 3, 1), 0, 0, {(9, -1, 0), (2, -1, 0), (4, -1, 0), (6, -1, 0)}),
        ((5, 3, 1), 1, 0, {(9, -1, 0), (2, -1, 0), (4, -1, 0)}),
        ((0,), 1, 1, {(9, -1, 0), (2, 5, 1)}),  # the token that only the device knows may be 1
        ((3,), 0, 1, {(9, -1, 0), (2, 5, 1), (4, 5, 1)}),
        ((5, 3), 0, 1, {(9, -1, 0), (2, 5, 1), (4, 5, 1), (6, 5, 1)}),
        ((5, 3), 1, 1, {(9, -1, 0), (2, 5, 1), (4, 5, 1)}),
    ],
)
def test_bad_words_block_their_last_token(known, num_prompt, unknown, expected):
    _, rows = build_parts(
        part(0, temperature=1),
        part(5, known=known, num_prompt=num_prompt, unknown=unknown, bad_words_token_ids=WORDS),
    )
    fields = (
        rows.blocked.rows,
        rows.blocked.ids,
        rows.blocked.previous_row,
        rows.blocked.previous_token,
    )
    found = [e for e in zip(*(f.tolist() for f in fields), strict=True) if e[0] < 4]
    assert {e[1:] for e in found} == expected
    assert {e[0] for e in found} == {1}


def test_seen_tokens_grow_with_the_request_and_are_cleared_when_the_row_is_reused():
    builder = SamplingBatchBuilder(num_rows=S, vocab_size=V)
    _, rows = build_parts(
        part(3, known=(7, 7, 8), num_prompt=2, presence_penalty=1), builder=builder
    )
    assert entries(rows.seen, 4) == [(0, 7, 0), (0, 8, 1)]
    assert rows.seen.pending_row.tolist() == [-1] * 4

    grown = [7, 7, 8, *range(100), 8]
    later = part(3, known=grown, num_prompt=2, unknown=1, presence_penalty=1)
    plan = StepPlan(1, (part(0), part(1, temperature=1), later))
    builder.admit(part(0))
    builder.admit(part(1, temperature=1))
    rows = builder.build(plan, builder.needs(plan), 4)
    counts = {token: grown[2:].count(token) for token in grown}
    assert entries(rows.seen, 4) == sorted((1, token, n) for token, n in counts.items())
    assert rows.seen.pending_row.tolist() == [-1, 3, -1, -1]

    _, rows = build_parts(part(3, known=(1,), num_prompt=1, presence_penalty=1), builder=builder)
    assert entries(rows.seen, 4) == [(0, 1, 0)]


def test_token_lists_have_few_sizes():
    """Their sizes grow by factors, so that 60 lengths need few programs."""
    sizes = []
    for num_parts in range(1, S + 1):
        for length in range(400, 4400, 400):
            parts = [part(row, known=range(length), presence_penalty=1) for row in range(num_parts)]
            _, rows = build_parts(*parts, num_rows=S)
            assert len(rows.seen.ids) == len(rows.biased.ids) == len(rows.blocked.ids)
            assert len(entries(rows.seen, S)) == num_parts * length
            sizes.append(len(rows.seen.ids))
    assert len(set(sizes)) <= 6


@pytest.mark.parametrize(
    ("name", "params", "value"),
    [
        ("temperature", {"temperature": 1e308}, 1e6),
        ("temperature", {"temperature": 1e-4}, 0.01),
        ("repetition", {"repetition_penalty": 1e-320}, 1e-6),
        ("repetition", {"repetition_penalty": 1e308}, 1e6),
    ],
)
def test_limits_values_that_overflow_float32(name, params, value):
    _, rows = build_parts(part(**{"temperature": 1, **params}))
    assert getattr(rows, name)[0] == np.float32(value)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-6},
        {"temperature": 0.001},
        {"temperature": 1e308},
        {"temperature": 0, "top_p": 0.5},
        {"temperature": 0, "top_k": 3},
        {"temperature": 0, "min_p": 0.5},
        {"repetition_penalty": 1e308},
    ],
)
def test_rejects_parameters_that_are_not_normalised(params):
    """The front normalises; an engine that did it again would hide a front that does not."""
    wrong = msgspec.structs.replace(part(0), params=SamplingParams(seed=0, **params))
    with pytest.raises(AssertionError, match=r"greedy|normalised"):
        SamplingBatchBuilder(num_rows=S, vocab_size=V).admit(wrong)

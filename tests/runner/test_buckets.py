"""Buckets: the padded shapes of steps, and the smallest bucket for a plan."""

import pytest

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.buckets import Bucket, Buckets, powers_of_two, sampler_sizes, table_widths
from jaxserve.sampling_params import SamplingParams


def make_plan(*parts: tuple[int, int]) -> StepPlan:
    """Returns a plan whose parts are given as (start, num_tokens)."""
    scheduled = tuple(
        ScheduledRequest(
            request_id=str(row), row=row, is_new=False, start=start, num_tokens=num_tokens,
            token_ids=[1] * num_tokens, table_updates=(), samples=True,
            params=SamplingParams(seed=0), eos_token_id=None, num_prompt_tokens=1,
            known_token_ids=[],
        )
        for row, (start, num_tokens) in enumerate(parts)
    )  # fmt: skip
    return StepPlan(0, scheduled)


BUCKETS = Buckets(max_num_rows=64, max_num_batched_tokens=512, table_widths=(4, 32))


def test_buckets_of_the_default_sizes():
    narrow = [(b.num_tokens, b.num_rows) for b in BUCKETS.all if b.table_width == 4]
    assert narrow == [
        (2, 2), (4, 4), (8, 8), (16, 16), (32, 8), (32, 32), (64, 8), (64, 64),
        (128, 8), (128, 64), (256, 8), (256, 64), (512, 8), (512, 64),
    ]  # fmt: skip
    assert len(BUCKETS.all) == 2 * len(narrow)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], Bucket(2, 2, 4)),
        ([(0, 1)], Bucket(2, 2, 4)),
        ([(63, 1)] * 3, Bucket(4, 4, 4)),
        ([(64, 1)] * 3, Bucket(4, 4, 32)),
        ([(0, 1)] * 33, Bucket(64, 64, 4)),
        ([(5, 1), (0, 2)], Bucket(32, 8, 4)),
        ([(0, 32)], Bucket(32, 8, 4)),
        ([(0, 33)], Bucket(64, 8, 4)),
        ([(0, 1)] * 8 + [(0, 2)], Bucket(128, 64, 4)),
        ([(0, 512)], Bucket(512, 8, 32)),
    ],
)
def test_smallest_for_returns_the_cheapest_bucket_that_holds_the_plan(parts, expected):
    assert BUCKETS.smallest_for(make_plan(*parts), block_size=16) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 9, 100])
@pytest.mark.parametrize("extra", [0, 1, 7, 1000])
def test_every_plan_within_the_limits_has_a_bucket(max_num_seqs, extra):
    max_tokens = max_num_seqs + extra
    buckets = Buckets(
        max_num_rows=max_num_seqs, max_num_batched_tokens=max_tokens, table_widths=(128,)
    )
    for rows in range(1, max_num_seqs + 1):
        for tokens in {rows, rows + 1, (rows + max_tokens) // 2, max_tokens}:
            if not rows <= tokens <= max_tokens:
                continue
            parts = [(0, 1)] * (rows - 1) + [(0, tokens - rows + 1)]
            bucket = buckets.smallest_for(make_plan(*parts), block_size=16)
            assert bucket.num_rows >= 2
            assert bucket.decode_only == (tokens == rows)


def test_table_widths_hold_the_longest_request():
    assert table_widths(8192, 16) == (512,)
    assert table_widths(100, 16) == (7,)
    assert table_widths(131072, 16) == (512, 8192)


def test_powers_of_two_end_at_the_limit():
    assert powers_of_two(2, 2) == [2]
    assert powers_of_two(2, 64) == [2, 4, 8, 16, 32, 64]
    assert powers_of_two(32, 100) == [32, 64, 100]


def test_the_sampler_has_few_sizes():
    assert sampler_sizes(1) == (1,)
    assert sampler_sizes(4) == (4,)
    assert sampler_sizes(6) == (4, 6)
    assert sampler_sizes(64) == (4, 16, 32, 64)
    assert sampler_sizes(100) == (4, 16, 32, 64, 100)

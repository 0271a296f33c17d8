"""The counts of requests and steps, beside values that are counted one by one."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.front.counts import NUM_GAUGES, LocalCounts
from jaxserve.front.metrics import (
    BOUNDS,
    CACHED_TOKENS,
    FINISHED,
    FIRST_CELLS,
    GENERATION_TOKENS,
    MAX_TOKEN_BOUNDS,
    PROMPT_TOKENS,
    STEP_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    RequestMetrics,
    RequestRecord,
    StepMetrics,
    num_cells,
    token_buckets,
)
from jaxserve.ipc.messages import StepOutputs, StepStats

# Multiples of 1/1024 s, whose sums are exact in any order.
SECONDS = st.integers(0, 1 << 20).map(lambda n: n / 1024)


@given(st.lists(st.tuples(SECONDS | st.sampled_from(TOKEN_BOUNDS), st.integers(1, 4))))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it(values) -> None:
    cells = LocalCounts(100).own
    histogram = Histogram(TOKEN_BOUNDS, cells, 7)
    for value, times in values:
        histogram.observe(value, times)
    each = [value for value, times in values for _ in range(times)]
    ends = (*TOKEN_BOUNDS, float("inf"))
    below = [sum(value <= end for value in each) for end in ends]
    assert histogram.counts == [b - a for a, b in zip([0, *below], below, strict=False)]
    assert abs(histogram.sum - sum(each)) <= 1e-9 * sum(each)
    assert not any(cells[:7]), "cells before those of the histogram"
    assert not any(cells[7 + len(TOKEN_BOUNDS) + 2 :]), "cells after those of the histogram"


@given(st.integers(1, 3), st.lists(st.integers(1, 3)), SECONDS)
def test_tokens_that_arrive_together_share_the_time_since_those_before(first, later, start) -> None:
    """``first``, ``later``: the numbers of tokens of the outputs, which are one second apart."""
    metrics = RequestMetrics(1000)
    record = RequestRecord(start, 20, 50, 1, num_cached_tokens=16)
    for i, count in enumerate((first, *later)):
        metrics.tokens_arrived(record, count, start + 1 + i)
    gaps = [0.0] * (first - 1)
    for count in later:
        gaps += [1 / count] * count
    latency = metrics.inter_token_latency
    assert sum(latency.counts) == len(gaps)
    for i, count in enumerate(latency.counts):
        assert count == sum(bisect_left(TOKEN_BOUNDS, gap) == i for gap in gaps)
    assert metrics.time_to_first_token.sum == 1
    assert sum(metrics.time_to_first_token.counts) == 1
    assert metrics.generation_tokens == record.num_generated == first + sum(later)
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (20, 16)


def test_an_embedding_has_a_time_and_no_tokens() -> None:
    metrics = RequestMetrics(1000)
    metrics.tokens_arrived(RequestRecord(1.0, 20, 0, 1), 0, 3.0)
    assert metrics.time_to_first_token.sum == 2
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (20, 0)
    assert sum(metrics.inter_token_latency.counts) == 0


def test_every_number_has_cells_of_its_own() -> None:
    cells = [PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, *FINISHED.values()]
    for name, bounds in BOUNDS.items():
        width = (MAX_TOKEN_BOUNDS if bounds is None else len(bounds)) + 2
        cells += range(FIRST_CELLS[name], FIRST_CELLS[name] + width)
    assert cells == list(range(NUM_GAUGES, num_cells(0)))
    assert num_cells(3) == num_cells(0) + 3 * (len(STEP_BOUNDS) + 2)


def test_the_cells_do_not_depend_on_the_length_of_the_context() -> None:
    assert token_buckets(1) == (1,)
    assert token_buckets(50) == (1, 2, 5, 10, 20, 50)
    assert len(token_buckets(1 << 62)) == MAX_TOKEN_BOUNDS
    assert list(token_buckets(1 << 62)) == sorted(set(token_buckets(1 << 62)))


def test_the_steps_of_each_engine_are_counted_once() -> None:
    counts = LocalCounts(num_cells(2))
    steps = StepMetrics(counts.own)
    for engine, total, tokens in ((0, 1, 30), (1, 1, 8), (0, 2, 1), (0, 2, 1), (1, 2, 0)):
        stats = StepStats(total_steps=total, num_step_tokens=tokens)
        steps.step_done(StepOutputs(engine, [], stats))
    read = StepMetrics(counts.totals()).step_tokens
    assert {engine: histogram.sum for engine, histogram in read.items()} == {0: 31, 1: 8}
    assert {engine: sum(histogram.counts) for engine, histogram in read.items()} == {0: 2, 1: 1}
    assert not any(counts.own[: -2 * (len(STEP_BOUNDS) + 2)])

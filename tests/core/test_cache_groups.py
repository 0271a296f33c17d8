"""Cache groups: the blocks that a request holds and that its queries see, and their scheduling."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.core.cache_groups import CacheGroups
from jaxserve.testing.scheduling import add, make_scheduler, update

groups = st.builds(
    CacheGroups,
    windows=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=4).map(tuple),
    block_size=st.integers(1, 9),
    max_num_batched_tokens=st.integers(1, 30),
    max_drafts=st.integers(0, 9),
)


def seen_blocks(groups, window, start, end):
    """Returns the blocks that queries at the positions from ``start`` to ``end`` - 1 see."""
    first = [0 if window is None else max(0, p - window + 1) for p in range(start, end)]
    seen = itertools.chain.from_iterable(
        range(a, p + 1) for a, p in zip(first, range(start, end), strict=True)
    )
    return {position // groups.block_size for position in seen}


@given(groups, st.integers(0, 100), st.integers(1, 100))
def test_a_request_holds_what_the_next_step_and_all_later_ones_see(groups, start, num_new):
    end = start + min(num_new, groups.max_num_batched_tokens + groups.max_drafts)
    for window in groups.windows:
        held = groups.held(window, start, start + num_new)
        seen = seen_blocks(groups, window, start, end)
        assert seen <= set(held)
        assert min(held) == min(seen), "the first block is seen"
        if window is None:
            assert held == range(-(-(start + num_new) // groups.block_size))
        else:
            assert len(held) <= groups.most_held(window)


@given(groups, st.integers(1, 60))
def test_a_request_holds_the_same_blocks_until_it_says(groups, num_tokens):
    for window in groups.windows:
        held = groups.held(window, num_tokens - 1, num_tokens)
        until = groups.unchanged_until(window, held)
        assert until >= num_tokens
        for later in range(num_tokens, until + 1):
            assert groups.held(window, later - 1, later) == held
        assert groups.held(window, until, until + 1) != held


@given(groups, st.integers(1, 120))
def test_most_blocks_is_the_largest_sum_over_the_groups(groups, num_tokens):
    """Counts the blocks at the start of each step, for every size of the steps before it."""
    for window in groups.windows:
        most = max(len(groups.held(window, start, num_tokens)) for start in range(num_tokens))
        alone = dataclasses.replace(groups, windows=(window,))
        assert most <= alone.most_blocks(num_tokens)
        assert window is not None or most == alone.most_blocks(num_tokens)


def test_the_most_blocks_of_a_windowed_group_are_needed():
    """A window of 8 and a step of 4 tokens see 11 positions, which can touch 4 blocks of 4."""
    groups = CacheGroups((8,), 4, 4)
    assert groups.most_held(8) == 4
    assert max(len(seen_blocks(groups, 8, start, start + 4)) for start in range(20)) == 4


@given(groups, st.integers(0, 60), st.integers(1, 120))
def test_the_longest_request_fits_and_a_longer_one_does_not(groups, num_blocks, limit):
    longest = groups.longest(num_blocks, limit)
    assert 0 <= longest <= limit
    assert longest == 0 or groups.most_blocks(longest) <= num_blocks
    assert longest == limit or groups.most_blocks(longest + 1) > num_blocks


@pytest.mark.parametrize(
    ("windows", "expected"),
    [((None,), 100), ((None, None), 200), ((None, 16), 103), ((16,), 3), ((2000,), 100)],
)
def test_counts_the_blocks_of_a_long_request(windows, expected):
    assert CacheGroups(windows, 16, 17).most_blocks(1600) == expected


def test_a_windowed_cache_holds_requests_of_any_length():
    groups = CacheGroups((16,), 16, 17)
    assert groups.longest(2, 1600) == 32
    assert groups.longest(3, 1600) == 1600


class TestCacheGroups:
    """One group keeps all blocks, two have a window of 6 tokens. Blocks have 4 positions."""

    WINDOWS = (None, 6, 6)

    def held(self, scheduler):
        """Returns the number of blocks that each running request holds in each group."""
        return {
            request.id: [sum(block_id != 0 for block_id in table) for table in request.block_tables]
            for request in scheduler._running
        }

    def test_a_long_completion_holds_few_blocks_of_windowed_groups(self):
        scheduler = make_scheduler(windows=self.WINDOWS, num_blocks=60, max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=30)
        for num_tokens in range(30, 100):
            plan = scheduler.schedule(0.0)
            while not plan.sampling:
                update(scheduler, plan)
                # The window and a step of 8 tokens see 13 positions.
                assert max(self.held(scheduler)["a"][1:]) <= 4
                plan = scheduler.schedule(0.0)
            if num_tokens > 30:
                whole, *windowed = self.held(scheduler)["a"]
                assert whole == -(-num_tokens // 4)
                assert max(windowed) <= 3, "6 positions touch at most 3 blocks"
                assert scheduler.stats().kv_usage == pytest.approx((whole + sum(windowed)) / 59)
            update(scheduler, plan)
            if scheduler.has_work:
                scheduler.check_integrity()
        assert not scheduler.has_work

    def test_a_prompt_keeps_its_blocks_of_windowed_groups_until_its_end(self):
        """A completion takes every free block, and must not preempt the prompt before it."""
        windows = (None, 6)
        scheduler = make_scheduler(
            windows=windows, num_blocks=18, max_num_seqs=2, max_num_batched_tokens=4,
            policy="priority",
        )  # fmt: skip
        add(scheduler, "b", num_prompt_tokens=4, priority=1)
        update(scheduler, scheduler.schedule(0.0))
        add(scheduler, "a", num_prompt_tokens=40, priority=0)
        starts = []
        while not starts or starts[-1] < 40:
            plan = scheduler.schedule(0.0)
            starts += [part.start for part in plan.scheduled if part.request_id == "a"]
            scheduler.check_integrity()
            update(scheduler, plan)
        assert starts == sorted(starts), "a started again"
        assert starts.count(0) == 1

    def test_a_single_windowed_group_serves_contexts_larger_than_the_pool(self):
        scheduler = make_scheduler(windows=(6,), num_blocks=4 + 1, max_num_batched_tokens=8)
        add(scheduler, "a", num_prompt_tokens=50)
        outputs = []
        while scheduler.has_work:
            outputs += update(scheduler, scheduler.schedule(0.0))
        assert len(outputs) == 50
        assert scheduler.stats().total_preemptions == 0

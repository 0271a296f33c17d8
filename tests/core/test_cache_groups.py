"""Cache groups: the blocks that a request holds, compared with those that its queries see."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.core.cache_groups import CacheGroups

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

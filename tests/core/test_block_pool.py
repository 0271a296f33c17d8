"""Block pool: the order of free blocks, sharing, and integrity checks."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.core.block_pool import BlockPool


def test_a_new_pool_hands_out_its_blocks_in_order_and_never_block_0():
    pool = BlockPool(6)
    assert pool.usage == 0
    assert pool.take(2) == [1, 2]
    assert pool.take(3) == [3, 4, 5]
    assert pool.num_free == 0
    assert pool.usage == 1
    pool.check_integrity()


def test_blocks_shared_by_two_requests_are_freed_tail_first():
    pool = BlockPool(11)
    first = pool.take(4)
    assert first == [1, 2, 3, 4]
    shared = first[:3]
    pool.share(shared)
    second = shared + pool.take(1)
    assert second == [1, 2, 3, 5]
    pool.release(first)
    pool.release(second)
    assert pool.free_block_ids() == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    pool.check_integrity()


def test_sharing_a_free_block_removes_it_from_the_free_list():
    pool = BlockPool(6)
    pool.release(pool.take(5))
    assert pool.free_block_ids() == [5, 4, 3, 2, 1]
    pool.share([3])
    assert pool.take(4) == [5, 4, 2, 1]
    pool.check_integrity()


def test_rejects_taking_too_many_blocks_and_releasing_twice():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 are free"):
        pool.take(4)
    block_ids = pool.take(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="is already free"):
        pool.release(block_ids)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._num_references.__setitem__(1, 0),
        lambda pool: pool._num_references.__setitem__(4, 1),
        lambda pool: pool._previous.__setitem__(4, 0),
        lambda pool: setattr(pool, "_num_free", 2),
        lambda pool: pool._next.__setitem__(3, 0),
    ],
)
def test_check_integrity_detects_damage(damage):
    pool = BlockPool(6)
    pool.take(2)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMatchesLists(RuleBasedStateMachine):
    """Compares the pool with plain lists: `free` in order, and the blocks of each table."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.free = list(range(1, num_blocks))
        self.tables = []

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(0, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count) == expected
        self.tables.append(expected)

    @rule(data=st.data())
    def share(self, data):
        every_block = list(range(1, self.num_blocks))
        block_ids = data.draw(st.lists(st.sampled_from(every_block), unique=True))
        self.pool.share(block_ids)
        self.free = [block for block in self.free if block not in block_ids]
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        still_held = {block for other in self.tables for block in other}
        self.free += [block for block in reversed(table) if block not in still_held]

    @invariant()
    def pool_matches_lists(self):
        self.pool.check_integrity()
        assert self.pool.free_block_ids() == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.usage == pytest.approx(1 - len(self.free) / (self.num_blocks - 1))


TestPoolMatchesLists = PoolMatchesLists.TestCase
TestPoolMatchesLists.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

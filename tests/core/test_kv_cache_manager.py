"""KV cache manager: block tables grow with their requests and are freed with them."""

import pytest

from jaxserve.core.block_pool import BlockPool
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.kv_cache_manager import KVCacheManager
from jaxserve.core.request import Request
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams


def make_request(request_id="a"):
    submit = Submit(request_id, [1, 2, 3], SamplingParams(seed=0))
    return Request.from_submit(submit, order=0, context_length=100)


@pytest.fixture
def pool():
    return BlockPool(6)


@pytest.fixture
def manager(pool):
    return KVCacheManager(pool, CacheGroups((None,), 4, 8))


def test_a_table_grows_only_when_a_block_is_full(manager):
    request = make_request()
    grown = [list(manager.allocate(request, n)) for n in range(1, 10)]
    expected = {0: (0, [1]), 4: (1, [2]), 8: (2, [3])}
    assert grown == [[(0, *expected[i])] if i in expected else [] for i in range(9)]
    assert request.block_tables == [[1, 2, 3]]
    assert manager.usage == pytest.approx(3 / 5)


def test_allocates_many_blocks_at_once(manager):
    request = make_request()
    assert manager.allocate(request, 17) == [(0, 0, [1, 2, 3, 4, 5])]
    assert manager.usage == 1


def test_failed_allocation_changes_nothing(manager, pool):
    first, second = make_request("a"), make_request("b")
    manager.allocate(first, 8)
    manager.allocate(second, 4)
    assert manager.allocate(second, 13) is None
    assert second.block_tables == [[3]]
    assert pool.free_block_ids() == [4, 5]
    assert manager.allocate(second, 12) == [(0, 1, [4, 5])]
    pool.check_integrity()


def test_freed_blocks_are_allocated_again(manager, pool):
    first, second = make_request("a"), make_request("b")
    manager.allocate(first, 20)
    assert manager.allocate(second, 1) is None
    manager.free(first)
    assert first.block_tables == []
    assert manager.allocate(second, 8) == [(0, 0, [5, 4])]
    pool.check_integrity()


class TestGroups:
    """One group keeps all blocks; one has a window of 6 tokens and steps of at most 8."""

    def make_manager(self, num_blocks):
        pool = BlockPool(num_blocks)
        return KVCacheManager(pool, CacheGroups((None, 6), 4, 8)), pool

    def test_every_group_has_its_own_blocks(self):
        manager, _ = self.make_manager(10)
        request = make_request()
        assert manager.allocate(request, 5) == [(0, 0, [1, 2]), (1, 0, [3, 4])]
        assert request.block_tables == [[1, 2], [3, 4]]
        manager.check_integrity([request])
        manager.free(request)
        assert request.block_tables == []
        assert manager.usage == 0

    def test_a_block_is_given_back_when_the_window_has_left_it(self):
        manager, pool = self.make_manager(10)
        request = make_request()
        manager.allocate(request, 9)
        request.num_computed_tokens = 8  # the query at 8 sees positions 3 to 8
        assert not manager.allocate(request, 9)
        request.num_computed_tokens = 9
        assert manager.allocate(request, 10) == [(1, 0, [0])]
        assert request.block_tables == [[1, 2, 3], [0, 5, 6]]
        assert pool.free_block_ids()[-1] == 4
        manager.check_integrity([request])
        manager.free(request)
        pool.check_integrity()
        assert pool.num_used == 0

    def test_the_table_of_a_long_prompt_grows_by_what_it_gives_back(self):
        # The window and a step touch at most 4 blocks. The other group holds all 10.
        manager, pool = self.make_manager(14 + 1)
        request = make_request()
        updates = manager.allocate(request, 40)
        assert [(u.group, u.start, len(u.block_ids)) for u in updates] == [(0, 0, 10), (1, 0, 4)]
        assert pool.num_free == 0
        for start in range(8, 40, 8):
            request.num_computed_tokens = start
            assert manager.allocate(request, 40) is not None
            manager.check_integrity([request])
        assert [bool(block_id) for block_id in request.block_tables[1]] == [False] * 6 + [True] * 4
        assert pool.num_free == 0

    def test_blocks_that_are_given_back_make_room_for_new_ones(self):
        manager, pool = self.make_manager(6 + 1)
        request = make_request()
        manager.allocate(request, 12)
        request.num_computed_tokens = 12
        assert pool.num_free == 0
        assert manager.allocate(request, 13) is None
        assert request.block_tables == [[1, 2, 3], [4, 5, 6]]
        manager.check_integrity([request])
        request.num_computed_tokens = 13
        assert manager.allocate(request, 13) is not None

    def test_check_integrity_detects_a_hole_in_a_window(self):
        manager, _ = self.make_manager(10)
        request = make_request()
        manager.allocate(request, 12)
        request.block_tables[1][1] = 0
        with pytest.raises(AssertionError, match="a seen block was given back"):
            manager.check_integrity([request])

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
    grown = [manager.allocate(request, n) for n in range(1, 10)]
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

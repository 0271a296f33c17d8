"""KV cache manager: block tables grow with their requests and are freed with them."""

import pytest

from jaxserve.core.block_pool import BlockPool
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
    return KVCacheManager(pool, block_size=4)


def test_a_table_grows_only_when_a_block_is_full(manager):
    request = make_request()
    grown = [list(manager.allocate(request, n)) for n in range(1, 10)]
    assert grown == [[1], [], [], [], [2], [], [], [], [3]]
    assert request.block_ids == [1, 2, 3]
    assert manager.usage == pytest.approx(3 / 5)


def test_allocates_many_blocks_at_once(manager):
    request = make_request()
    assert manager.allocate(request, 17) == [1, 2, 3, 4, 5]
    assert manager.usage == 1


def test_failed_allocation_changes_nothing(manager, pool):
    first, second = make_request("a"), make_request("b")
    manager.allocate(first, 8)
    manager.allocate(second, 4)
    assert manager.allocate(second, 13) is None
    assert second.block_ids == [3]
    assert pool.free_block_ids() == [4, 5]
    assert manager.allocate(second, 12) == [4, 5]
    pool.check_integrity()


def test_freed_blocks_are_allocated_again(manager, pool):
    first, second = make_request("a"), make_request("b")
    manager.allocate(first, 20)
    assert manager.allocate(second, 1) is None
    manager.free(first)
    assert first.block_ids == []
    assert manager.allocate(second, 8) == [5, 4]
    pool.check_integrity()

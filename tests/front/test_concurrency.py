"""Bounded work: results as they complete, items read late, the rest cancelled on error or close."""

import asyncio
import itertools

import pytest

from jaxserve.front.concurrency import bounded_as_completed


async def test_results_arrive_as_they_complete() -> None:
    events = [asyncio.Event() for _ in range(3)]

    async def work(i: int) -> int:
        await events[i].wait()
        return i

    results = bounded_as_completed(range(3), work, limit=3)
    order = []
    for i in (2, 0, 1):
        events[i].set()
        order.append(await anext(results))
    assert order == [2, 0, 1]
    assert [result async for result in results] == []


async def test_work_in_flight_is_limited_and_items_are_read_late() -> None:
    running = most_running = last_read = 0

    def items():
        nonlocal last_read
        for i in range(1, 101):
            last_read = i
            yield i

    async def work(i: int) -> int:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        assert last_read <= i + 8
        await asyncio.sleep(0)
        running -= 1
        return i

    results = [result async for result in bounded_as_completed(items(), work, limit=7)]
    assert sorted(results) == list(range(1, 101))
    assert most_running == 7


async def test_items_may_be_infinite() -> None:
    async def work(i: int) -> int:
        return i

    results = bounded_as_completed(itertools.count(), work, limit=2)
    assert sorted([await anext(results) for _ in range(50)])[0] == 0
    await results.aclose()


async def test_an_error_cancels_the_others_and_is_raised() -> None:
    cancelled = []

    async def work(i: int) -> None:
        if i == 3:
            raise ValueError("three")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    with pytest.raises(ValueError, match="three"):
        async for _ in bounded_as_completed(range(10), work, limit=4):
            pass
    assert sorted(cancelled) == [0, 1, 2]


async def test_closing_waits_for_cancelled_work() -> None:
    ended = []

    async def work(i: int) -> int:
        if i == 0:
            return 0
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(i)
        return i

    results = bounded_as_completed(range(3), work, limit=3)
    assert await anext(results) == 0
    await results.aclose()
    assert sorted(ended) == [1, 2]

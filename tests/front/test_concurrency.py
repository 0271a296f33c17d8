"""Bounded work: items read late, results as they complete, all cancelled on error or close."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from jaxserve.front.concurrency import bounded_as_completed, for_each


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


async def numbers(end: int, started: list[int] | None = None) -> AsyncIterator[int]:
    for i in range(end):
        if started is not None:
            started.append(i)
        yield i


async def test_for_each_limits_the_work_in_flight_and_requests_items_late() -> None:
    requested: list[int] = []
    running: set[int] = set()
    done: list[int] = []

    async def work(i: int) -> None:
        running.add(i)
        assert len(running) <= 7
        assert len(requested) <= len(done) + 7
        await asyncio.sleep(0)
        running.remove(i)
        done.append(i)

    await for_each(numbers(100, requested), work, limit=7)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("limit", [1, 4, 100])
async def test_an_error_of_for_each_cancels_the_others_and_is_raised(limit: int) -> None:
    """With room for more work, the next item is being waited for when the error is raised."""
    started, ended = [], []

    async def endless() -> AsyncIterator[int]:
        for i in range(4):
            yield i
        await asyncio.Event().wait()

    async def work(i: int) -> None:
        started.append(i)
        try:
            if i == min(3, limit - 1):
                raise ValueError("three")
            await asyncio.Event().wait()
        finally:
            ended.append(i)

    with pytest.raises(ValueError, match="three"):
        await for_each(endless(), work, limit=limit)
    assert sorted(started) == sorted(ended) == list(range(min(4, limit)))


async def test_an_error_of_the_items_of_for_each_is_raised() -> None:
    async def failing() -> AsyncIterator[int]:
        yield 0
        raise OSError("gone")

    async def work(i: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="gone"):
        await for_each(failing(), work, limit=2)


async def test_cancelling_for_each_waits_for_cancelled_work() -> None:
    ended = []

    async def work(i: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(i)

    running = asyncio.create_task(for_each(numbers(9), work, limit=3))
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == [0, 1, 2]

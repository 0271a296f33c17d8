"""Work runs in few threads, waits in a short queue, and is given up when its caller leaves."""

import asyncio
import threading

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.front import work_pool
from jaxserve.front.work_pool import Abandoned, WorkPool
from jaxserve.testing.waiting import until, wait_until


class Held:
    """Work that ends when `go` is set. ``begun`` has the names of those that have begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def work(self, name: str):
        def work(_):
            self.begun.append(name)
            assert self.go.wait(60)
            return name

        return work


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_few_run_and_few_wait(num_threads) -> None:
    pool, held = WorkPool("test", num_threads=num_threads, max_waiting=2), Held()
    tasks = [asyncio.create_task(pool.run(held.work(str(i)))) for i in range(num_threads + 2)]
    await until(lambda: len(held.begun) == num_threads)
    with pytest.raises(QueueFullError, match="2 requests wait for the same work"):
        await pool.run(held.work("too many"))
    held.go.set()
    assert await asyncio.gather(*tasks) == [str(i) for i in range(num_threads + 2)]
    assert await pool.run(lambda _: threading.current_thread().name) != "MainThread"


async def test_an_error_of_the_work_is_raised_and_frees_the_thread() -> None:
    pool = WorkPool("test", max_waiting=1)

    def fail(_):
        raise ValueError("wrong")

    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            await pool.run(fail)


async def test_small_work_overtakes_large_work_that_has_not_waited_long(monkeypatch) -> None:
    monkeypatch.setattr(work_pool, "SIZE_PER_S", 1e-3)  # a unit of size lasts longer than the test
    pool, held = WorkPool("test", max_waiting=9), Held()
    sizes = {"first": 0, "large": 5, "small": 1, "larger": 9, "also small": 1}
    tasks = []
    for name, size in sizes.items():
        tasks.append(asyncio.create_task(pool.run(held.work(name), size=size)))
        await asyncio.sleep(0)
    held.go.set()
    await asyncio.gather(*tasks)
    assert held.begun == ["first", "small", "also small", "large", "larger"]


async def test_a_full_queue_refuses_its_last(monkeypatch) -> None:
    """So large work, however much of it waits, never keeps small work out."""
    monkeypatch.setattr(work_pool, "SIZE_PER_S", 1e-3)
    pool, held = WorkPool("test", max_waiting=2), Held()
    tasks = {}
    for name, size in {"first": 0, "large": 5, "larger": 9, "small": 1}.items():
        tasks[name] = asyncio.create_task(pool.run(held.work(name), size=size))
        await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await tasks.pop("larger")
    with pytest.raises(QueueFullError):
        await pool.run(held.work("as large"), size=9)
    held.go.set()
    await asyncio.gather(*tasks.values())
    assert held.begun == ["first", "small", "large"]


async def test_work_is_in_order_of_arrival_in_the_long_run(monkeypatch) -> None:
    monkeypatch.setattr(work_pool, "SIZE_PER_S", 1e12)  # waiting outweighs every size
    pool, held = WorkPool("test", max_waiting=9), Held()
    tasks = []
    for i in range(4):
        tasks.append(asyncio.create_task(pool.run(held.work(str(i)), size=4 - i)))
        await until(lambda n=i: held.begun and pool.num_waiting == n)
    held.go.set()
    await asyncio.gather(*tasks)
    assert held.begun == ["0", "1", "2", "3"]


async def test_a_caller_that_leaves_gives_up_its_place() -> None:
    pool, held = WorkPool("test", max_waiting=2), Held()
    first, second, third = [
        asyncio.create_task(pool.run(held.work(name))) for name in ("first", "second", "third")
    ]
    await until(lambda: pool.num_waiting == 2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert pool.num_waiting == 1
    held.go.set()
    assert await asyncio.gather(first, third) == ["first", "third"]
    assert held.begun == ["first", "third"]


async def test_work_that_has_begun_ends_at_its_next_check() -> None:
    pool = WorkPool("test", max_waiting=0)
    ended = []

    def work(caller):
        try:
            while True:
                caller.check()
        except Abandoned:
            ended.append(True)
            raise

    task = asyncio.create_task(pool.run(work))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await pool.run(lambda _: None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: ended)

    async def is_free() -> bool:
        try:
            return await pool.run(lambda _: True)
        except QueueFullError:
            return False

    async with asyncio.timeout(60):
        while not await is_free():
            await asyncio.sleep(0.001)


async def test_a_turn_that_comes_while_its_caller_leaves_goes_to_the_next() -> None:
    pool, held = WorkPool("test", max_waiting=3), Held()
    tasks = [asyncio.create_task(pool.run(held.work(str(i)))) for i in range(3)]
    await until(lambda: pool.num_waiting == 2)
    held.go.set()
    pool._next()  # the turn of the second one
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert await asyncio.gather(tasks[0], tasks[2]) == ["0", "2"]


async def test_a_turn_of_a_caller_that_has_just_left_goes_to_the_next() -> None:
    """A thread becomes free after the caller was cancelled and before the loop has resumed it."""
    pool, held = WorkPool("test", max_waiting=3), Held()
    tasks = [asyncio.create_task(pool.run(held.work(str(i)))) for i in range(4)]
    await until(lambda: pool.num_waiting == 3)
    held.go.set()
    pool._executor.submit(int).result(60)  # the first work has ended, and the loop does not know
    tasks[1].cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results.pop(1), asyncio.CancelledError)
    assert results == ["0", "2", "3"]
    assert await pool.run(lambda _: "free again") == "free again"


async def test_a_caller_that_has_just_left_makes_room_in_a_full_queue() -> None:
    pool, held = WorkPool("test", max_waiting=1), Held()
    first, second = [asyncio.create_task(pool.run(held.work(name))) for name in ("1", "2")]
    await until(lambda: pool.num_waiting == 1)
    third = asyncio.create_task(pool.run(held.work("3")))
    second.cancel()
    await asyncio.sleep(0)
    held.go.set()
    assert await asyncio.gather(first, third) == ["1", "3"]
    assert second.cancelled()


def test_a_loop_that_has_closed_is_no_error() -> None:
    pool, held = WorkPool("test", max_waiting=0), Held()

    async def leave() -> None:
        task = asyncio.create_task(pool.run(held.work("a")))
        await until(lambda: held.begun)
        task.cancel()

    asyncio.run(leave())
    held.go.set()
    pool._executor.shutdown()

"""Work that an event interrupts, and work in the background."""

import asyncio

import pytest

from jaxserve.testing.waiting import until
from server.tasks import Interrupted, background, unless_done


async def test_an_event_cancels_work_that_has_not_ended():
    event = asyncio.get_running_loop().create_future()
    cancelled = asyncio.Event()

    async def work():
        try:
            event.set_result(None)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(Interrupted):
        await unless_done(event, work())
    assert cancelled.is_set()


async def test_work_that_ends_first_counts():
    event = asyncio.get_running_loop().create_future()

    async def work(error):
        if error is not None:
            raise error
        event.set_result(None)
        return 7

    with pytest.raises(ValueError, match="wrong"):
        await unless_done(event, work(ValueError("wrong")))
    assert await unless_done(event, work(None)) == 7


async def test_work_that_fails_because_of_the_event_is_interrupted():
    event = asyncio.get_running_loop().create_future()

    async def work():
        event.set_result(None)
        raise ValueError("the event is the reason")

    with pytest.raises(Interrupted):
        await unless_done(event, work())


async def test_background_work_ends_with_its_block_and_its_failure_is_logged(caplog):
    failed, cancelled = asyncio.Event(), asyncio.Event()

    async def work(*, fails):
        try:
            if fails:
                failed.set()
                raise ValueError("wrong")
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with background(work(fails=True)):
        await failed.wait()
        await until(lambda: "ValueError: wrong" in caplog.text)
    cancelled.clear()
    caplog.clear()
    with background(work(fails=False)):
        await asyncio.sleep(0)
    await cancelled.wait()
    assert not caplog.text

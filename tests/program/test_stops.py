"""When a server stops and how fast; what a stop does to work that has begun."""

import asyncio

import pytest

from jaxserve.program.stops import Haste, Stops
from server.tasks import Interrupted, unless_done


async def test_the_haste_only_grows():
    stops = Stops()
    assert stops.haste == Haste.LIMITED, "of a server that cannot go on"
    for haste, expected in (
        (Haste.UNLIMITED, Haste.UNLIMITED),
        (Haste.LIMITED, Haste.LIMITED),
        (Haste.UNLIMITED, Haste.LIMITED),
        (Haste.AT_ONCE, Haste.AT_ONCE),
        (Haste.LIMITED, Haste.AT_ONCE),
    ):
        stops.decide(haste)
        assert stops.haste == expected
        assert stops.stop.done()
        assert stops.limited.done() == (expected >= Haste.LIMITED)
        assert stops.at_once.done() == (expected >= Haste.AT_ONCE)


async def test_at_once_decides_everything():
    stops = Stops()
    stops.decide(Haste.AT_ONCE)
    assert all(each.done() for each in (stops.stop, stops.limited, stops.at_once))


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

"""How fast a program has to stop once somebody has decided that it has to."""

from jaxserve.program.stops import Haste, Stops


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

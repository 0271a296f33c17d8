"""The places of answers under way are taken and given back, whatever becomes of the answers."""

import gc
from collections.abc import AsyncGenerator

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.front.admission import Places, TakenPlaces


def test_all_or_none_are_taken_and_come_back_once() -> None:
    places = Places(5)
    first = places.take(3)
    with pytest.raises(QueueFullError, match="3 requests are under way .* at most 5"):
        places.take(3)
    second = places.take(2)
    assert places.num_taken == 5
    first.give_back()
    first.give_back()
    assert places.num_taken == 2
    second.give_back()
    assert places.num_taken == 0


@pytest.mark.parametrize("starts", [False, True])
async def test_a_generator_that_is_dropped_gives_them_back(starts) -> None:
    async def work(taken: TakenPlaces) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            taken.give_back()

    places = Places(2)
    generator = work(places.take(2))
    if starts:
        await anext(generator)
    assert places.num_taken == 2
    await generator.aclose()
    del generator
    gc.collect()
    assert places.num_taken == 0

"""The admission of answers in flight are taken and given back, whatever becomes of the answers."""

import gc
from collections.abc import AsyncGenerator

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.front.admission import AdmissionLimit, Permit


def test_all_or_none_are_taken_and_come_back_once() -> None:
    admission = AdmissionLimit(5)
    first = admission.take(3)
    with pytest.raises(QueueFullError, match="3 requests are in flight .* at most 5"):
        admission.take(3)
    second = admission.take(2)
    assert admission.num_taken == 5
    first.release()
    first.release()
    assert admission.num_taken == 2
    second.release()
    assert admission.num_taken == 0


@pytest.mark.parametrize("starts", [False, True])
async def test_a_generator_that_is_dropped_gives_them_back(starts) -> None:
    async def work(taken: Permit) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            taken.release()

    admission = AdmissionLimit(2)
    generator = work(admission.take(2))
    if starts:
        await anext(generator)
    assert admission.num_taken == 2
    await generator.aclose()
    del generator
    gc.collect()
    assert admission.num_taken == 0

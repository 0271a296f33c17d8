"""Permits are counted up to the limit, and released however the work ends."""

import gc
from collections.abc import AsyncGenerator

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.front.admission import AdmissionLimit, Permit


def test_a_request_is_admitted_as_a_whole_and_released_once() -> None:
    admission = AdmissionLimit(5)
    first = admission.admit(3)
    with pytest.raises(QueueFullError, match="3 completions are in flight .* at most 5"):
        admission.admit(3)
    second = admission.admit(2)
    assert admission.num_in_flight == 5
    first.release()
    first.release()
    assert admission.num_in_flight == 2
    second.release()
    assert admission.num_in_flight == 0


def test_permits_go_back_one_by_one_and_the_rest_together() -> None:
    admission = AdmissionLimit(5, unit="calls")
    with admission.admit(3) as permit:
        permit.release_one()
        assert admission.num_in_flight == 2
        with pytest.raises(QueueFullError, match="2 calls are in flight"):
            admission.admit(4)
    assert admission.num_in_flight == 0
    permit.release_one()
    assert admission.num_in_flight == 0


@pytest.mark.parametrize("starts", [False, True])
async def test_dropping_a_generator_releases_its_permit(starts) -> None:
    async def work(permit: Permit) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            permit.release()

    admission = AdmissionLimit(2)
    generator = work(admission.admit(2))
    if starts:
        await anext(generator)
    assert admission.num_in_flight == 2
    await generator.aclose()
    del generator
    gc.collect()
    assert admission.num_in_flight == 0

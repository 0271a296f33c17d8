"""Streams of many kinds while engines are killed, stopped and made to raise; and without faults."""

import psutil
import pytest

from jaxserve.bench.held import Held
from jaxserve.bench.stress import Job, stress


def test_what_is_left_over_is_a_complaint() -> None:
    before = Held(memory_bytes=2**27, num_descriptors=30, num_processes=2)
    assert before.is_within(before)
    assert not Held(2**28, 30, 2).is_within(before)
    assert not Held(2**27, 40, 2).is_within(before)
    assert not Held(2**27, 30, 3).is_within(before)


@pytest.mark.parametrize("num_fronts", [1, 2])
async def test_streams_survive_engines_that_die(tmp_path, num_fronts) -> None:
    """The long form: ``python -m jaxserve.bench.stress --faults --seconds 120 --streams 200``."""
    job = Job(40, seconds=20, num_requests=None, faults=True, seed=1, num_fronts=num_fronts)
    tally = await stress(tmp_path, job)
    assert not tally.complaints
    assert sum(tally.injuries.values()) > 0
    assert tally.outcomes["answered"] > 100
    assert tally.outcomes["crashed twice"] <= 0.05 * tally.outcomes["answered"]


async def test_memory_stays_flat(tmp_path) -> None:
    """The long form is ``python -m jaxserve.bench.stress --num-requests 20000``."""
    tally = await stress(
        tmp_path, Job(num_streams=32, seconds=None, num_requests=600, faults=False, seed=2)
    )
    assert not tally.complaints
    assert tally.outcomes == {"answered": 920}
    assert not [p for p in psutil.Process().children() if "server" in p.cmdline()]

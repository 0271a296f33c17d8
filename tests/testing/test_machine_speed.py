"""The slowness of a machine is measured before and after, and is never below 1."""

from jaxserve.testing import machine_speed
from jaxserve.testing.machine_speed import RUNS, Reference


def nothing() -> None:
    pass


def test_a_faster_machine_counts_as_the_reference() -> None:
    assert Reference(nothing, seconds=1e6).slowness() == 1.0


def test_the_fastest_run_of_each_moment_counts_and_the_mean_of_both_moments(monkeypatch) -> None:
    before, after = [0.3, 0.2, 0.4], [0.9, 0.6, 0.5]
    assert len(before) == RUNS
    readings = iter([time for seconds in before + after for time in (0.0, seconds)])
    monkeypatch.setattr(machine_speed.time, "thread_time", lambda: next(readings))
    with Reference(nothing, seconds=0.1).measuring() as slowness:
        assert slowness.value == 2.0
    assert slowness.value == 3.5

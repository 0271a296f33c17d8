"""Limits of processor time are longer on slower machines, and never shorter."""

import pytest

from jaxserve.testing import machine_speed
from jaxserve.testing.machine_speed import slowness


def test_a_faster_machine_counts_as_equally_fast(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "REFERENCE_S", 1e6)
    assert slowness() == 1.0


def test_the_slowness_is_that_of_the_best_try(monkeypatch) -> None:
    times = iter([0.0, 0.9, 1.0, 1.3, 2.0, 2.6])
    monkeypatch.setattr(machine_speed, "NUM_TRIES", 3)
    monkeypatch.setattr(machine_speed, "REFERENCE_S", 0.1)
    monkeypatch.setattr(machine_speed.time, "thread_time", lambda: next(times))
    assert slowness() == pytest.approx(3.0)

import queue

import pytest

from jaxserve.engine import phase as phase_module
from jaxserve.engine.phase import Phase
from jaxserve.ipc.messages import Progress


def test_a_phase_reports_start_updates_and_duration():
    reports: list[Progress] = []
    with Phase(3, "read", "bytes", reports.append) as phase:
        phase.update(5, 10, "half")
    assert reports[:2] == [
        Progress(3, "read", 0, 0, "bytes"),
        Progress(3, "read", 5, 10, "bytes", "half"),
    ]
    last = reports[-1]
    assert (last.done, last.total, last.detail) == (5, 10, "half")
    assert last.seconds is not None


def test_a_silent_phase_repeats_what_it_said_last(monkeypatch):
    monkeypatch.setattr(phase_module, "REPEAT_S", 0.001)
    reports: queue.Queue[Progress] = queue.Queue()
    with Phase(0, "read", "bytes", reports.put) as phase:
        phase.update(5, 10)
        expected = Progress(0, "read", 5, 10, "bytes")
        for _ in range(2):
            while reports.get(timeout=60) != expected:
                pass


def test_a_phase_that_fails_does_not_say_that_it_ended():
    reports: list[Progress] = []
    with pytest.raises(RuntimeError), Phase(0, "read", "bytes", reports.append):
        raise RuntimeError
    assert all(report.seconds is None for report in reports)

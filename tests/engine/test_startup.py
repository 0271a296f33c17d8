"""Progress of a start: the reports of a phase, and the lines that are printed."""

import io
import queue
from contextlib import suppress

import pytest

from jaxserve.engine import startup
from jaxserve.engine.startup import Phase, ProgressLines, describe
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


def test_a_silent_phase_repeats_its_last_report(monkeypatch):
    monkeypatch.setattr(startup, "REPEAT_S", 0.001)
    reports: queue.Queue[Progress] = queue.Queue()
    with Phase(0, "read", "bytes", reports.put) as phase:
        phase.update(5, 10)
        expected = Progress(0, "read", 5, 10, "bytes")
        for _ in range(2):
            while reports.get(timeout=60) != expected:
                pass


def test_a_failed_phase_does_not_report_an_end():
    reports: list[Progress] = []
    with pytest.raises(RuntimeError), Phase(0, "read", "bytes", reports.append):
        raise RuntimeError
    assert all(report.seconds is None for report in reports)


def test_describe_names_the_engine_the_phase_and_the_counts() -> None:
    assert describe(Progress(0, "load weights", 3, 10, "tensors")) == (
        "engine 0: load weights: 3 of 10 tensors"
    )
    ended = Progress(1, "compile", 4, 0, "programs", detail="128 rows", seconds=2.25)
    assert describe(ended) == "engine 1: compile: 4 programs, 128 rows, 2.2 s"


def test_prints_only_the_end_of_a_fast_phase() -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    for done in range(100):
        lines(Progress(0, "load weights", done, 100, "tensors"))
    lines(Progress(0, "load weights", 100, 100, "tensors", seconds=0.1))
    assert out.getvalue() == "engine 0: load weights: 100 of 100 tensors, 0.1 s\n"


def test_a_line_that_cannot_be_printed_does_not_end_the_start() -> None:
    with open("/dev/full", "w") as full:
        with Phase(0, "read", "bytes", ProgressLines(full)) as phase:
            phase.update(1, 2)
        with suppress(OSError):
            full.close()  # tries once more to write the line
    ProgressLines(full)(Progress(0, "read", 2, 2, "bytes", seconds=0.1))


def test_prints_updates_of_a_slow_phase(monkeypatch) -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    monkeypatch.setattr("jaxserve.engine.startup.INTERVAL_S", 0.0)
    lines(Progress(0, "compile", 1, 9, "programs"))
    assert out.getvalue() == "engine 0: compile: 1 of 9 programs\n"

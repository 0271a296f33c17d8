import io

from jaxserve.engine.progress_lines import ProgressLines, describe
from jaxserve.ipc.messages import Progress


def test_describe() -> None:
    assert describe(Progress(0, "load weights", 3, 10, "tensors")) == (
        "engine 0: load weights: 3 of 10 tensors"
    )
    ended = Progress(1, "compile", 4, 0, "programs", detail="128 rows", seconds=2.25)
    assert describe(ended) == "engine 1: compile: 4 programs, 128 rows, 2.2 s"


def test_only_ends_are_printed_while_it_goes_fast() -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    for done in range(100):
        lines(Progress(0, "load weights", done, 100, "tensors"))
    lines(Progress(0, "load weights", 100, 100, "tensors", seconds=0.1))
    assert out.getvalue() == "engine 0: load weights: 100 of 100 tensors, 0.1 s\n"


def test_a_slow_phase_shows_life(monkeypatch) -> None:
    out = io.StringIO()
    lines = ProgressLines(out)
    monkeypatch.setattr("jaxserve.engine.progress_lines.INTERVAL_S", 0.0)
    lines(Progress(0, "compile", 1, 9, "programs"))
    assert out.getvalue() == "engine 0: compile: 1 of 9 programs\n"

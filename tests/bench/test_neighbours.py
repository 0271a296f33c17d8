"""The comparison of neighbours, of a server whose engine's tokens are arithmetic."""

import json
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.http import Timing
from jaxserve.bench.neighbours import kinds, seconds_between_tokens
from jaxserve.errors import JaxserveError

SLOW_ENGINE = """
from dataclasses import replace
from jaxserve.testing import fake_engine

def build(config, engine, on_progress):
    model = replace(config.model, model="fake:step_s=0.01")
    return fake_engine.build(replace(config, model=model), engine, on_progress)
"""


def timing(first: float, gap: float, count: int) -> Timing:
    return Timing(0.0, [(first + i * gap, i + 1) for i in range(count)])


def test_every_kind_is_compared(
    front_checkpoint: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    tmp_path.joinpath("slow_engine.py").write_text(SLOW_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = tmp_path / "figures.json"
    small = ["--num-neighbours", "2", "--input-len", "5", "--output-len", "60", "--repeats", "1"]
    flags = ["--model", str(front_checkpoint), *small, "--output", str(output), "--"]
    assert main(["neighbours", *flags, "--engine-factory", "slow_engine:build"]) == 0
    figures = json.loads(output.read_text())
    assert figures["ratios"].keys() == kinds(1).keys()
    assert figures["cpu_ratios"].keys() == kinds(1).keys()
    for ratios in (*figures["ratios"].values(), *figures["cpu_ratios"].values()):
        assert len(ratios) == 1
        assert all(ratio > 0 for ratio in ratios)
    table = capsys.readouterr().out
    assert all(f"| {kind} |" in table for kind in kinds(1))


def test_only_the_common_time_counts_and_only_the_neighbours() -> None:
    # All three are under way from 5 to 10; the one beside is slow and does not count.
    neighbours = [timing(0.0, 0.5, 21), timing(5.0, 0.25, 101)]
    beside = timing(2.0, 4.0, 10)
    assert seconds_between_tokens(neighbours, beside=beside) == pytest.approx(1 / 3)


def test_answers_that_do_not_overlap_say_so() -> None:
    with pytest.raises(JaxserveError, match="output-len"):
        seconds_between_tokens([timing(0.0, 0.1, 5)], beside=timing(9.0, 0.1, 5))

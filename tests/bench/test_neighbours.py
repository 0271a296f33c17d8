"""The benchmark that compares requests with different neighbours, on a fake engine."""

import itertools
import json
from pathlib import Path

import pytest

from jaxserve.bench import neighbours
from jaxserve.bench.__main__ import main
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.neighbours import features, seconds_between_tokens
from jaxserve.bench.server_process import ServerProcess
from jaxserve.errors import JaxserveError

FAKE = ["--engine-factory", "jaxserve.testing.fake_engine:build"]


def timing(first: float, gap: float, count: int) -> Timing:
    return Timing(0.0, [(first + i * gap, i + 1) for i in range(count)])


def test_each_feature_is_compared_with_the_runs_before_and_after(
    front_checkpoint: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """The server accepts every body; the times of its replies and of the processors are faked."""
    calls = []

    async def fake_completion(host: str, port: int, body: dict) -> Timing:
        run = len(calls) // 3
        calls.append(body)
        await stream_completion(host, port, body)
        # Every feature runs once to warm up. Then even runs are plain, each a tenth slower.
        warm = 1 + len(features(1))
        gap = 1.1 ** (run - warm) * (3 if (run - warm) % 2 else 1)
        return timing(0.0, gap, 9)

    ticks = itertools.count()
    monkeypatch.setattr(neighbours, "stream_completion", fake_completion)
    monkeypatch.setattr(ServerProcess, "cpu_seconds", lambda self: next(ticks))
    output = tmp_path / "figures.json"
    small = ["--num-neighbours", "2", "--input-len", "5", "--output-len", "9", "--repeats", "1"]
    flags = ["--model", str(front_checkpoint), *small, "--output", str(output), "--", *FAKE]
    assert main(["neighbours", *flags]) == 0
    for number, fields in enumerate(features(9).values(), start=1):
        assert calls[3 * number + 2].items() >= fields.items()
    figures = json.loads(output.read_text())
    assert figures["ratios"].keys() == figures["cpu_ratios"].keys() == features(1).keys()
    for feature, ratios in figures["ratios"].items():
        assert ratios == pytest.approx([3 * 1.1 / ((1 + 1.1**2) / 2)])
        assert figures["cpu_ratios"][feature] == [1.0]
    table = capsys.readouterr().out
    assert all(f"| {feature} |" in table for feature in features(1))


def test_only_neighbours_count_and_only_while_all_requests_run() -> None:
    # All three are in flight from 5 to 10; the request beside is slow and does not count.
    others = [timing(0.0, 0.5, 21), timing(5.0, 0.25, 101)]
    beside = timing(2.0, 4.0, 10)
    assert seconds_between_tokens(others, beside=beside) == pytest.approx(1 / 3)


def test_completions_that_do_not_overlap_are_an_error() -> None:
    with pytest.raises(JaxserveError, match="output-len"):
        seconds_between_tokens([timing(0.0, 0.1, 5)], beside=timing(9.0, 0.1, 5))

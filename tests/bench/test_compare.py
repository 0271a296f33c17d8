"""The benchmarks that compare two servers, on fake engines."""

import itertools
import json

import pytest

from jaxserve.bench import pairs
from jaxserve.bench.__main__ import main
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.pairs import Pairs, output_rate
from jaxserve.bench.server_process import ServerProcess

FAKE = ["--engine-factory", "jaxserve.testing.fake_engine:build"]


def test_both_servers_get_the_same_requests_in_turn(
    front_checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    sent = []

    async def recorded(host: str, port: int, body: dict) -> Timing:
        sent.append((port, tuple(body["prompt"])))
        return await stream_completion(host, port, body)

    ticks = itertools.count()
    monkeypatch.setattr(pairs, "stream_completion", recorded)
    monkeypatch.setattr(ServerProcess, "cpu_seconds", lambda self: next(ticks))
    output = tmp_path / "figures.json"
    flags = ["--model", str(front_checkpoint), "--concurrent", "1", "3", "--repeats", "2"]
    flags += ["--input-len", "5", "--output-len", "9", "--output", str(output)]
    flags += [f"--base-flags={' '.join(FAKE)}", "--", *FAKE, "--max-num-seqs", "2"]
    assert main(["compare", *flags]) == 0

    rows = json.loads(output.read_text())["rows"]
    assert [row["num_requests"] for row in rows] == [1, 3]
    assert all(len(figures) == 2 for row in rows for figures in row["pairs"].values())
    base, second = dict.fromkeys(port for port, _ in sent)
    for size, start in ((1, 2), (3, 6)):  # one request for each server to warm up
        runs = [sent[start + i * size : start + (i + 1) * size] for i in range(4)]
        assert [{port for port, _ in run} for run in runs] == [{base}, {second}] * 2
        assert len({frozenset(prompt for _, prompt in run) for run in runs}) == 1
    page = capsys.readouterr().out
    assert f"base: {' '.join(FAKE)}; compared: {' '.join(FAKE)} --max-num-seqs 2" in page
    assert "| 3 |" in page


def test_rates_count_whole_runs() -> None:
    timings = [Timing(0.0, [(1.0, 1), (3.0, 5)]), Timing(0.0, [(2.0, 2), (4.0, 10)])]
    assert output_rate(timings) == pytest.approx((5 + 10) / 4)


def test_ratios_are_those_of_pairs() -> None:
    figures = Pairs([10.0, 30.0, 20.0], [30.0, 15.0, 25.0], [0.5, 0.9, 0.8])
    assert figures.ratios == [3.0, 0.5, 1.25]
    assert figures.cells() == "20.0 | 25.0 | 1.25 | 0.80"

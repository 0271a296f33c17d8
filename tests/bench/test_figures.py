"""Figures of a benchmark, computed from the arrival times of tokens."""

import dataclasses
import json

import pytest

from jaxserve.bench.figures import Figures, LoadFigures, Machine
from jaxserve.bench.http import Timing


def timing(sent: float, first: float, gap: float, count: int) -> Timing:
    """Returns the timing of a completion whose tokens arrive ``gap`` seconds apart."""
    arrivals = [(first + i * gap, i + 1) for i in range(count)]
    return Timing(sent, arrivals, num_prompt_tokens=10)


def test_figures_of_one_request() -> None:
    figures = LoadFigures.of([timing(1.0, 3.0, 0.5, 9)])
    assert figures == LoadFigures(
        num_requests=1,
        num_prompt_tokens=10,
        num_output_tokens=9,
        seconds=6.0,
        output_tokens_per_s=1.5,
        steady_tokens_per_s=2.0,  # 8 tokens in the 4 s after the first
        ttft_median_s=2.0,
        ttft_max_s=2.0,
    )


def test_the_steady_rate_excludes_ramps() -> None:
    # The second starts late, the first ends early; in between both get 10 tokens a second.
    early, late = timing(0.0, 1.0, 0.1, 101), timing(0.0, 6.0, 0.1, 101)
    figures = LoadFigures.of([early, late])
    assert figures.steady_tokens_per_s == pytest.approx(20.0)
    assert figures.output_tokens_per_s == pytest.approx(202 / 16)
    assert (figures.ttft_median_s, figures.ttft_max_s) == (6.0, 6.0)


def test_tokens_that_arrive_together_all_count() -> None:
    bundled = Timing(0.0, [(1.0, 1), (2.0, 5), (3.0, 9)], 10)
    assert LoadFigures.of([bundled]).steady_tokens_per_s == 4.0


def test_requests_that_do_not_overlap_have_no_steady_rate() -> None:
    first, second = timing(0.0, 1.0, 0.1, 5), timing(0.0, 9.0, 0.1, 5)
    assert LoadFigures.of([first, second]).steady_tokens_per_s is None


def test_the_table_and_json_show_every_figure() -> None:
    load = LoadFigures.of([timing(0.0, 0.25, 0.1, 101)])
    figures = Figures(
        machine=Machine.this(),
        model="m",
        server_flags=["--dtype", "float32"],
        input_len=128,
        output_len=128,
        cold_start_s=None,
        warm_start_s=4.5,
        alone=load,
        together=dataclasses.replace(load, num_requests=64),
        front_peak_bytes=100 * 2**20,
        engine_peak_bytes=900 * 2**20,
        idle_cpu=0.012,
    )
    table = figures.table()
    for text in ("not measured", "4.5 s", "250 ms", "10.0 output tokens/s", "64 requests"):
        assert text in table
    for text in ("100 MiB", "900 MiB", "1.2%", "--dtype float32", figures.machine.processor):
        assert text in table
    assert json.loads(json.dumps(dataclasses.asdict(figures)))["warm_start_s"] == 4.5

"""The tuner: its candidates, its lines for the table, and a run with toy sizes."""

from __future__ import annotations

import importlib

import pytest

from pallas_kernels import tuning

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture
def tuner():
    return importlib.import_module("tune_kernels")


@pytest.mark.parametrize("kernel", [tuning.DECODE, tuning.RAGGED])
def test_candidates_are_distinct_and_include_the_configs_in_use(kernel, tuner):
    found = list(tuner.candidates(kernel, tiny=False))
    assert len(set(found)) == len(found)
    for head_dim in (64, 128):
        used = tuning.kernel_config(kernel, head_dim=head_dim, group=4, dtype="bfloat16")
        assert used in found


def test_a_printed_line_can_be_added_to_the_table(tuner, monkeypatch):
    spec = importlib.import_module("gpu.models").spec_of("llama-3.1-8b")
    best = tuning.KernelConfig(128, 64, 8, 4)
    line = tuner.entry(tuning.RAGGED, spec, best, "NVIDIA H200")
    entries = eval(f"({line.strip()})", vars(tuning).copy())
    monkeypatch.setattr(tuning, "_TABLE", entries + tuning._TABLE)
    call = {"kernel": tuning.RAGGED, "head_dim": 128, "group": 4, "dtype": "bfloat16"}
    assert tuning.kernel_config(**call, device="NVIDIA H200") == best
    assert tuning.kernel_config(**call, device="NVIDIA A100") != best
    assert tuning.kernel_config(**call | {"dtype": "float32"}, device="NVIDIA H200") != best


def test_the_tuner_runs_with_toy_sizes(tuner, tmp_path, capsys):
    assert tuner.main(["--tiny", "--output", str(tmp_path / "lines")]) == 0
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [line.split(",")[0].strip() for line in lines] == ["_Entry(DECODE", "_Entry(RAGGED"]
    assert capsys.readouterr().out.count(" us") == 4


def test_the_tuner_reports_a_missing_gpu(tuner, capsys):
    assert tuner.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_candidate_that_does_not_compile_is_skipped(tuner, monkeypatch):
    compiled = tuner.Workload.compiled

    def failing(self, config):
        if config.block_n == 16:
            raise RuntimeError("out of shared memory")
        return compiled(self, config)

    monkeypatch.setattr(tuner.Workload, "compiled", failing)
    assert tuner.tune(tuning.DECODE, "tiny", tuner.TINY, tiny=True).block_n == 32

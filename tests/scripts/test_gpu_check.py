"""The check for GPUs, run on a CPU, so that it is known to work before a GPU is used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def check():
    return importlib.import_module("gpu_check")


@pytest.fixture
def options(tmp_path):
    return importlib.import_module("gpu.options").Options(tiny=True, folder=tmp_path)


def replace_part(monkeypatch, run) -> None:
    """Replaces the function that runs a part."""
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(run=run))


def test_every_part_runs_with_toy_sizes(tmp_path):
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--tiny", "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert result.returncode == 0, result.stdout + result.stderr + logs
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(found) == ["target", "roofs", "numerics", "attention", "engine", "peer"]
    lines = [line for part in found.values() for line in part]
    assert not [line for line in lines if line["problem"]]
    values = {line["what"]: line["values"] for line in lines}
    assert values["memory"]["copy_GBps"] > 0
    assert values["decode int8 cache"]["error"] < 1e-2
    assert values["decode step, batch 4, context 48"]["ms"] > 0
    assert values["engine, 4 requests 12/4"]["compiled_meanwhile"] == 0
    table = result.stdout[result.stdout.index(" s\n") :]
    assert all(line["what"] in table for line in lines)


def test_a_failed_part_has_a_line_in_the_report(check, options, monkeypatch):
    def run(options, report):
        report.add("first", ms=1.0)
        raise RuntimeError("out of memory")

    replace_part(monkeypatch, run)
    assert check.run_part("engine", options) == check.FAILED
    first, failed = check.Report(options.folder / "engine.jsonl").findings()
    assert (first.what, first.problem) == ("first", "")
    assert failed.problem == "RuntimeError: out of memory"
    assert "FAILED: RuntimeError" in failed.row


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (ModuleNotFoundError("No module named 'torch'"), "No module named 'torch'"),
        ("torch sees no GPU", "torch sees no GPU"),
    ],
)
def test_a_part_that_cannot_run_is_skipped(reason, why, check, options, monkeypatch):
    def run(options, report):
        raise check.Skipped(reason) if isinstance(reason, str) else reason

    replace_part(monkeypatch, run)
    assert check.run_part("peer", options) == check.SKIPPED
    (line,) = check.Report(options.folder / "peer.jsonl").findings()
    assert (line.what, line.values, line.problem) == ("peer skipped", {"why": why}, "")


def test_a_part_that_takes_too_long_is_stopped(check, options):
    (line,) = check.start_part("roofs", options, 0.05)
    assert line.problem == "took longer than 0 s"


def test_a_wrong_result_fails_the_check(check, monkeypatch, tmp_path):
    wrong = check.Finding("decode", {"error": 0.5}, "relative error 5e-01, at most 1.5e-02")
    monkeypatch.setattr(check, "start_part", lambda *_: [wrong])
    assert check.main(["--only", "numerics", "--output", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("requested", "run"),
    [
        (["numerics"], ["numerics"]),
        (["engine", "numerics"], ["roofs", "numerics", "engine"]),
        (["peer", "attention"], ["roofs", "attention", "peer"]),
    ],
)
def test_roofs_are_measured_before_parts_that_need_them(requested, run, check):
    assert check.with_roofs(requested) == run


def test_detects_a_write_to_a_padding_slot(check, options, monkeypatch, rng):
    numerics = importlib.import_module("gpu.numerics")

    def write_without_mask(k_cache, v_cache, k, v, slots, layer, *, interpret):
        flat = [cache.reshape(-1, *cache.shape[3:]) for cache in (k_cache, v_cache)]
        flat = [cache.at[slots].set(new) for cache, new in zip(flat, (k, v), strict=True)]
        return [cache.reshape(k_cache.shape) for cache in flat]

    monkeypatch.setattr(numerics, "kv_write", write_without_mask)
    report = check.Report(options.folder / "lines")
    numerics._write(report, rng, "float32", True)
    assert "elements of the cache are wrong" in report.findings()[0].problem


def test_detects_a_wrong_kernel_even_if_its_output_is_nan(check, options, monkeypatch, rng):
    numerics = importlib.import_module("gpu.numerics")
    paged_decode = numerics.paged_decode
    shape = numerics.Shape((0, 17), [1, 1], num_heads=2, dtype="float32")
    for wrong in (1.1, np.nan):
        monkeypatch.setattr(
            numerics,
            "paged_decode",
            lambda *args, wrong=wrong, **options: paged_decode(*args, **options) * wrong,
        )
        report = check.Report(options.folder / "lines")
        numerics._attention(report, "decode", rng, shape, True)
        assert report.findings()[-1].problem.startswith("relative error")


def test_graphs_are_counted_in_the_files_of_the_compiler(options):
    steps = importlib.import_module("gpu.steps")
    assert steps.graphs_of_last_step(options.folder) == "unknown"
    folder = options.folder / "xla"
    folder.mkdir()
    (folder / "module_7.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source | sink]\n    001: kCopy [source | sink] kCopy\n"
        "002: kWhile [source | sink] while\n"
    )
    assert steps.graphs_of_last_step(options.folder) == "1 of 2"


def test_seconds_returns_the_time_of_a_call():
    timing = importlib.import_module("gpu.timing")
    spent = timing.seconds(jax.jit(lambda x: x + 1), np.ones(8))
    assert 0 < spent < 1

"""The compile gate: its verdicts, and the real thing where the compiler is installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import deviceless

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, with a compiler that is always there."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("aot_check")
    monkeypatch.setattr(module.deviceless, "is_available", lambda: True)
    monkeypatch.setattr(module, "find_ptxas", lambda: "ptxas")
    return module


def report(gate, **changes):
    facts = {
        "kernel": "some_kernel",
        "grid": "8x8x4",
        "threads": 128,
        "shared": 39168,
        "registers": 104,
        "spilled": 0,
        "num_wgmma": 0,
        "num_mma": 32,
        "num_async_loads": 32,
    }
    return gate.Report(**facts | changes)


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (8, 1)])
def test_a_spill_is_a_failure(spilled, status, gate, monkeypatch, capsys):
    monkeypatch.setattr(gate, "compile_case", lambda *_: [report(gate, spilled=spilled)])
    assert gate.main(["--filter", "norm 576"]) == status
    assert ("SPILLS" in capsys.readouterr().out) == bool(spilled)


def test_a_kernel_that_does_not_compile_is_a_failure(gate, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(gate, "compile_case", fail)
    assert gate.main(["--filter", "norm 576"]) == 1
    assert "FAILED: RuntimeError: no such instruction" in capsys.readouterr().out


def test_nothing_checked_is_a_failure(gate):
    assert gate.main(["--filter", "no such case"]) == 1


def test_a_missing_compiler_is_said(gate, monkeypatch, capsys):
    monkeypatch.setattr(gate, "find_ptxas", lambda: None)
    assert gate.main([]) == 2
    assert "ptxas is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({}, 4),  # registers: 104 * 32 * 4 of 65536
        ({"shared": 82944}, 2),  # shared memory: 82944 + 1024 of 233472
        ({"threads": 1024, "registers": 16, "shared": 0}, 2),  # threads: 1024 of 2048
        ({"threads": 32, "registers": 16, "shared": 0}, 32),  # the most there can be
    ],
)
def test_programs_of_a_multiprocessor_are_limited_by_what_runs_out_first(changes, programs, gate):
    assert report(gate, **changes).programs_per_sm == programs


@pytest.mark.skipif(not deviceless.is_available(), reason="needs the wheel jax-cuda13-plugin")
def test_kernels_compile_for_a_gpu():
    command = [sys.executable, str(SCRIPTS / "aot_check.py"), "--filter", "smollm2|fp8|norm 576"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 2:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    for kernel in ("paged_decode", "paged_decode_merge", "ragged_attention", "kv_write"):
        assert f" {kernel} " in result.stdout
    assert " 0 bad" in result.stdout

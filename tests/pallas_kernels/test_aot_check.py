"""Compile check: its verdicts, and a real compilation where the compiler is installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.testing import deviceless

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    """Returns the script as a module that always finds a compiler."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("aot_check")
    monkeypatch.setattr(module.deviceless, "is_available", lambda: True)
    monkeypatch.setattr(module, "find_ptxas", lambda: "ptxas")
    return module


def report(check, **changes):
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
    return check.Report(**facts | changes)


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (8, 1)])
def test_fails_if_registers_spill(spilled, status, check, monkeypatch, capsys):
    monkeypatch.setattr(check, "compile_case", lambda *_: [report(check, spilled=spilled)])
    assert check.main(["--filter", "write smollm2"]) == status
    assert ("SPILLS" in capsys.readouterr().out) == bool(spilled)


def test_fails_if_a_kernel_does_not_compile(check, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(check, "compile_case", fail)
    assert check.main(["--filter", "write smollm2"]) == 1
    assert "FAILED: RuntimeError: no such instruction" in capsys.readouterr().out


def test_fails_if_no_case_matches(check):
    assert check.main(["--filter", "no such case"]) == 1


def test_reports_a_missing_compiler(check, monkeypatch, capsys):
    monkeypatch.setattr(check, "find_ptxas", lambda: None)
    assert check.main([]) == 2
    assert "ptxas is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({}, 4),  # registers: 104 * 32 * 4 of 65536
        ({"shared": 82944}, 2),  # shared memory: 82944 + 1024 of 233472
        ({"threads": 1024, "registers": 16, "shared": 0}, 2),  # threads: 1024 of 2048
        ({"threads": 32, "registers": 16, "shared": 0}, 32),  # the maximum
    ],
)
def test_programs_per_multiprocessor_are_limited_by_the_scarcest_resource(changes, programs, check):
    assert report(check, **changes).programs_per_sm == programs


def step_report(check, **changes):
    facts = {
        "num_graphs": 1,
        "num_in_graphs": 432,
        "outside": (),
        "num_kernels": 29,
        "spilling": (),
        "state_bytes": 1000,
        "alias_bytes": 1000,
        "temp_bytes": 20,
        "copies": (),
        "recomputed": (),
    }
    return importlib.import_module("aot_steps").StepReport(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_graphs": 2}, "2 graphs"),
        ({"outside": ("kWhile while.3",)}, "outside of graphs ['kWhile while.3']"),
        ({"spilling": ("paged_decode",)}, "registers spill in paged_decode"),
        ({"alias_bytes": 500}, "500 of 1000 bytes are written in place"),
        ({"copies": ("copy copy.7",)}, "the cache is copied: copy copy.7"),
        ({"recomputed": ("fusion.1.remat",)}, "recomputed: fusion.1.remat"),
        ({"num_sums": 9, "expected_sums": 65}, "9 sums over devices, expected 65"),
    ],
)
def test_fails_and_names_the_problem_of_a_step(changes, problem, check, monkeypatch, capsys):
    assert step_report(check).problems == []
    monkeypatch.setattr(check, "compile_step", lambda *_, **__: step_report(check, **changes))
    assert check.main(["--filter", "step smollm2-135m decode 8 rows"]) == 1
    assert problem in capsys.readouterr().out


def test_finds_copies_of_the_cache_in_a_program(check):
    steps = importlib.import_module("aot_steps")
    text = """
ENTRY %main (k: bf16[4,64,2]) -> (bf16[4,64,2], f32[]) {
  %k.1 = bf16[4,64,2]{2,1,0} parameter(0)
  %wide = f32[512]{0} fusion(%k.1), kind=kLoop
  %small = bf16[4,63,2]{2,1,0} copy(%k.1)
  %kept = (bf16[4,64,2]{2,1,0}, bf16[8]{0}) custom-call(%k.1)
  %copy.7 = bf16[4,64,2]{2,1,0} copy(%k.1)
  ROOT %tuple = (bf16[4,64,2]{2,1,0}, f32[]) tuple(%copy.7, %small)
}
"""
    assert steps.find_copies(text, (4, 64, 2)) == ("fusion wide", "copy copy.7")


def test_counts_graphs(check, tmp_path):
    listing = tmp_path / "listing.txt"
    listing.write_text(
        "000: kCommandBuffer [source | next=012 (11)]\n"
        "    001: kCopy         [source       | next=012 (11)] kCopy\n"
        "    002: kCustomKernel [prev=001 (1) | sink         ] kv_write grid: [8, 1, 1]\n"
        "003: kWhile        [prev=000 (1) | sink] while.3\n"
    )
    launches = importlib.import_module("aot_dump").read_launches(listing)
    assert (launches.num_graphs, launches.num_in_graphs) == (1, 2)
    assert launches.outside == ("kWhile while.3",)


def run_check(*arguments: str) -> str:
    """Runs the script as a command and returns its output."""
    command = [sys.executable, str(SCRIPTS / "aot_check.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 2:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 bad" in result.stdout
    return result.stdout


needs_compiler = pytest.mark.skipif(
    not deviceless.is_available(), reason="needs the wheel jax-cuda13-plugin"
)


@needs_compiler
def test_kernels_compile_for_a_gpu():
    table = run_check("--filter", "^(decode|ragged|write).*(smollm2|fp8)")
    for kernel in ("paged_decode", "paged_decode_merge", "ragged_attention", "kv_write"):
        assert f" {kernel} " in table


@needs_compiler
def test_a_step_is_one_graph_that_writes_the_cache_in_place():
    """Steps of one device and of eight; a sum over devices is part of the graph."""
    table = run_check("--layers", "3", "--filter", "^step .*(decode 8 |8192 tokens)")
    lines = [line for line in table.splitlines() if line.startswith("step ")][1:]
    assert len(lines) == 9
    for line in lines:
        name, _, numbers = line.partition("rows")
        graphs, _, outside, _, spilling, state, alias, _, copies, recomputed, sums = numbers.split()
        assert (graphs, outside, spilling, copies, recomputed) == ("1", "0", "0", "0", "0")
        assert sums == ("7" if "on 8" in name else "0")
        assert state == alias
        assert int(state) > 99 * 10**9

#!/usr/bin/env python3
"""Runs every check and measurement that needs a GPU, on one GPU, in at most eight minutes.

    python scripts/gpu_check.py [--output FOLDER] [--only PART ...]
    python scripts/gpu_check.py --tiny        # toy sizes on a CPU, to test this script

Parts, each in its own process with a time limit:

  target     the compiler's description of the card
  roofs      rates of copying memory and of a large matrix product
  numerics   every kernel against float64
  attention  the attention kernels, by model, batch and context
  engine     Llama-3.1-8B with random weights: decode steps, a prefill, 256 requests
  peer       the same requests with transformers

A part whose packages are missing is skipped. If a part fails, the others still run. The table is
printed at the end. FOLDER/gpu_check.json has the same content, and FOLDER/PART.log has the output
of each part. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.options import DUMP, Options
from gpu.report import Finding, Report, Skipped, facts

# Time limit of each part in seconds. `LIMIT_S` limits their sum.
PARTS = {
    "target": 30,
    "roofs": 40,
    "numerics": 90,
    "attention": 100,
    "engine": 280,
    "peer": 80,
}
LIMIT_S = 470
# Exit statuses of a part.
FINE, FAILED, SKIPPED = 0, 1, 3


def run_part(name: str, options: Options) -> int:
    """Runs a part in this process and returns its exit status."""
    report = Report(options.folder / f"{name}.jsonl")
    try:
        importlib.import_module(f"gpu.{name}").run(options, report)
    except (Skipped, ModuleNotFoundError) as reason:
        report.add(f"{name} skipped", why=str(reason))
        return SKIPPED
    except Exception as error:  # any error becomes a line of the table
        traceback.print_exc()
        report.add(name, problem=f"{type(error).__name__}: {str(error)[:300]}")
        return FAILED
    return FINE


def start_part(name: str, options: Options, limit_s: float) -> list[Finding]:
    """Runs a part in its own process and returns its findings."""
    path = options.folder / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    known = options.folder / "facts.json"
    known.write_text(json.dumps(options.facts), encoding="utf-8")
    command = [sys.executable, __file__, "--part", name, "--output", str(options.folder)]
    command += ["--tiny"] * options.tiny
    problem = ""
    with (options.folder / f"{name}.log").open("wb") as log:
        try:
            result = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(options),
                timeout=None if math.isinf(limit_s) else limit_s,
                check=False,
            )
            if result.returncode not in (FINE, FAILED, SKIPPED):
                problem = f"exited with {result.returncode}, see {log.name}"
        except subprocess.TimeoutExpired:
            problem = f"took longer than {limit_s:.0f} s"
    report = Report(path)
    if problem:
        report.add(name, problem=problem)
    return report.findings()


def environment(options: Options) -> dict[str, str]:
    """Returns the environment of a part, in which jax reserves most memory and dumps its steps."""
    dump = (
        f"--xla_dump_to={options.folder / DUMP} --xla_dump_hlo_as_text "
        "--xla_dump_hlo_module_re=jit_step"
    )
    flags = f"{dump} {os.environ.get('XLA_FLAGS', '')}".strip()
    settings = {"XLA_FLAGS": flags, "XLA_CLIENT_MEM_FRACTION": "0.92"}
    if options.tiny:
        # Interpreted kernels are large programs that run once, so optimising them costs too much.
        settings |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    # The excluded variable is the old name of a setting above. jax refuses both names together.
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **inherited, **settings}


def with_roofs(asked: Sequence[str]) -> list[str]:
    """Returns the requested parts in order, with `roofs` if another part needs its rates."""
    needed = bool({"attention", "engine"} & set(asked))
    return [name for name in PARTS if name in asked or (name == "roofs" and needed)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check"), help="folder for the results"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    folder = asked.output.resolve()
    if asked.part:
        known = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        return run_part(asked.part, Options(asked.tiny, folder, known))

    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / DUMP, ignore_errors=True)
    start = time.monotonic()
    found: dict[str, list[Finding]] = {}
    for name in with_roofs(asked.only):
        known = facts(finding for findings in found.values() for finding in findings)
        options = Options(asked.tiny, folder, known)
        left = LIMIT_S - (time.monotonic() - start)
        # Toy sizes only test this script, and the machine may be slow or busy.
        limit_s = math.inf if asked.tiny else min(PARTS[name], max(left, 1))
        print(f"{name} ...", flush=True)
        found[name] = start_part(name, options, limit_s)
    lines = {name: [asdict(each) for each in findings] for name, findings in found.items()}
    (folder / "gpu_check.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
    print(f"\n{time.monotonic() - start:.0f} s")
    for findings in found.values():
        for finding in findings:
            print(finding.row)
    return FAILED if any(each.problem for group in found.values() for each in group) else FINE


if __name__ == "__main__":
    sys.exit(main())

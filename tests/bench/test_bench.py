"""The whole benchmark, on a server with a fake engine."""

import json
from pathlib import Path

from jaxserve.bench.__main__ import main

FAKE = ["--engine-factory", "jaxserve.testing.fake_engine:build"]


def run(checkpoint: Path, *argv: str, server: list[str]) -> int:
    small = ["--num-requests", "5", "--input-len", "20", "--output-len", "12"]
    idle = ["--idle-seconds", "0.2"]
    return main(["--model", str(checkpoint), *small, *idle, *argv, "--", *FAKE, *server])


def test_the_output_has_every_figure(front_checkpoint: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "figures.json"
    assert run(front_checkpoint, "--output", str(output), server=["--max-num-seqs", "8"]) == 0
    figures = json.loads(output.read_text())
    assert figures["together"]["num_requests"] == 5
    assert figures["together"]["num_prompt_tokens"] == 100
    assert figures["together"]["num_output_tokens"] == 60
    assert figures["alone"]["num_output_tokens"] == 12
    for figure in ("cold_start_s", "warm_start_s", "front_peak_bytes", "engine_peak_bytes"):
        assert figures[figure] > 0
    assert 0 <= figures["idle_cpu"] < 2
    assert "5 requests: whole run" in capsys.readouterr().out


def test_a_server_that_does_not_start_shows_its_output(front_checkpoint: Path, capsys) -> None:
    assert run(front_checkpoint, "--skip-cold-start", server=["--policy", "fastest"]) == 1
    message = capsys.readouterr().err
    assert "the server ended with exit code" in message
    assert "fastest" in message

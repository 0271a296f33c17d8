"""The requests per second of one and several front processes."""

import json
from pathlib import Path

from jaxserve.bench import fronts
from jaxserve.bench.__main__ import main


def test_each_number_of_fronts_is_measured_in_turns(
    front_checkpoint: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(fronts, "SETTLE_S", 0.1)
    monkeypatch.setattr(fronts, "ROUNDS", 1)
    output = tmp_path / "figures.json"
    small = ["--model", str(front_checkpoint), "--connections", "4", "--seconds", "1"]
    assert main(["fronts", *small, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["figures"]
    assert [figures["num_fronts"] for figures in found] == [1, 2]
    for figures in found:
        assert figures["requests_per_s"][0] > 0
        assert figures["server_cpu"] > 0
    assert "| 2 |" in capsys.readouterr().out

"""The comparison of weight formats, run with a tiny model."""

from __future__ import annotations

import importlib
import re

import pytest

from jaxserve.testing.tiny import write_checkpoint


@pytest.fixture
def compare():
    return importlib.import_module("compare_formats")


@pytest.mark.usefixtures("compile_quickly")
def test_prints_accuracy_and_times(compare, tmp_path, capsys):
    write_checkpoint(tmp_path / "tiny")
    text = tmp_path / "text.md"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    options = ["--model", str(tmp_path / "tiny"), "--text", str(text), "--windows", "1"]
    assert compare.main([*options, "--dtype", "float32", "--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = {line[:28].strip(): [float(x) for x in line[28:].split()] for line in lines[2:7]}
    assert figures["dense float32"][:3] == [0, 0, 1]
    assert figures["dense float32, 512 rows"] == figures["dense float32"]
    for rows in (512, 64):
        mean, p99, agreement, perplexity = figures[f"int8 float32, {rows} rows"]
        assert 0 < mean < p99 < 0.1
        assert agreement > 0.9
        assert perplexity == pytest.approx(figures["dense float32"][3], rel=0.05)
    steps = [re.search(r"step of +(\d+) rows: .* ratio (\S+)", line).groups() for line in lines[7:]]
    assert [int(rows) for rows, _ in steps] == [2, 16, 64]
    assert all(float(ratio) > 0 for _, ratio in steps)


def test_rejects_a_text_that_is_too_short(compare, tmp_path, capsys):
    write_checkpoint(tmp_path / "tiny")
    (tmp_path / "text.md").write_text("short")
    with pytest.raises(SystemExit):
        compare.main(["--model", str(tmp_path / "tiny"), "--text", str(tmp_path / "text.md")])
    assert "at least 512 tokens" in capsys.readouterr().err

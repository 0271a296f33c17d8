"""Results are written whole or not at all, and an impossible name is found before measuring."""

import argparse
import os
from pathlib import Path

import pytest

from jaxserve.bench import program
from jaxserve.bench.output_file import check_output, replacing


def fail_halfway(path: Path) -> None:
    with replacing(path) as new:
        new.write_text("half")
        raise RuntimeError


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path, link = tmp_path / "figures.json", tmp_path / "link.json"
    link.symlink_to(path)
    for old in (None, "old"):
        before = list(tmp_path.iterdir())
        with pytest.raises(RuntimeError):
            fail_halfway(link)
        assert list(tmp_path.iterdir()) == before
        assert old is None or path.read_text() == old
        with replacing(link) as new:
            assert new.suffix == ".json"
            new.write_text("old")
        assert path.read_text() == "old"
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    with replacing(Path("/dev/null")) as new:
        assert new == Path("/dev/null")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_output(fifo)
    with replacing(fifo) as new:
        assert new == fifo


def test_checking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    check_output(path)
    assert not path.exists()
    path.write_text("old")
    check_output(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    for wrong in (tmp_path, tmp_path / "missing" / "x", path / "x"):
        with pytest.raises(OSError, match="folder|No such file|Not a directory"):
            check_output(wrong)


def test_a_program_does_not_measure_for_an_impossible_output(tmp_path: Path, capsys) -> None:
    def measure(args: argparse.Namespace) -> program.Report:
        raise AssertionError("measured")

    parser = program.base_parser("bench", None)
    output = tmp_path / "missing" / "figures.json"
    assert program.run(measure, parser, ["--output", str(output)]) == 1
    assert capsys.readouterr().err.startswith("error: ")

"""Which inputs and outputs are opened, and how; the same file is never both."""

import os
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.offline.open_files import (
    RequestFile,
    RequestStream,
    check_different,
    open_requests,
    open_results,
)
from jaxserve.offline.result_file import ResultFile
from jaxserve.offline.streams import ResultStream

DASH = Path("-")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    return path


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_inputs(tmp_path: Path, file: Path, fifo: Path) -> None:
    assert isinstance(open_requests(file), RequestFile)
    for stream in (DASH, Path("/dev/stdin"), fifo, Path("/dev/null")):
        assert isinstance(open_requests(stream), RequestStream)
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "missing", "there is no file")):
        with pytest.raises(ConfigError, match=reason):
            open_requests(path)


def test_requests_are_counted_without_empty_lines(tmp_path: Path, fifo: Path) -> None:
    path = tmp_path / "three"
    path.write_text("{}\n\n  \n{}\n{}")
    assert open_requests(path).count() == 3
    assert open_requests(fifo).count() is None


async def test_outputs(tmp_path: Path, file: Path, fifo: Path) -> None:
    results = open_results(tmp_path / "new", resume=True, overwrite=False)
    assert isinstance(results, ResultFile)
    results.close()
    for stream in (DASH, Path("/dev/stdout"), fifo, Path("/dev/null")):
        for overwrite in (False, True):
            results = open_results(stream, resume=False, overwrite=overwrite)
            assert isinstance(results, ResultStream)
        with pytest.raises(ConfigError, match="--resume needs a file of results"):
            open_results(stream, resume=True, overwrite=False)
    with pytest.raises(IsADirectoryError):
        open_results(tmp_path, resume=False, overwrite=True)


def test_the_same_file_is_refused_by_any_name(tmp_path: Path, file: Path, fifo: Path) -> None:
    symlink, hard_link = tmp_path / "symlink", tmp_path / "hard"
    symlink.symlink_to(file)
    hard_link.hardlink_to(file)
    through_folder = tmp_path / "folder" / ".." / "in.jsonl"
    (tmp_path / "folder").mkdir()
    names = [file, symlink, hard_link, through_folder]
    for input in names:
        for output in names:
            with pytest.raises(ConfigError, match="are the same file"):
                check_different(input, output)
    with pytest.raises(ConfigError, match="are the same file"):
        check_different(fifo, fifo)
    for output in (tmp_path / "new", fifo, tmp_path, file / "below", Path("/dev/null")):
        check_different(file, output)
    check_different(Path("/dev/null"), Path("/dev/null"))


def test_the_standard_streams_can_be_the_same_file(file: Path, monkeypatch) -> None:
    def check(descriptor: int, input: Path, output: Path) -> None:
        with file.open("rb") as opened, monkeypatch.context() as patch:
            real = os.fstat

            def fstat(fd: int) -> os.stat_result:
                return real(opened.fileno() if fd == descriptor else fd)

            patch.setattr("jaxserve.offline.open_files.os.fstat", fstat)
            check_different(input, output)

    for stdin in (DASH, Path("/dev/stdin")):
        with pytest.raises(ConfigError, match="are the same file"):
            check(0, stdin, file)
    for stdout in (DASH, Path("/dev/stdout")):
        with pytest.raises(ConfigError, match="are the same file"):
            check(1, file, stdout)

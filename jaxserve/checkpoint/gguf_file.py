"""Reads the GGUF container format: metadata, and the offset of each tensor.

    "GGUF" version num_tensors num_fields | fields | tensor entries | padding | tensor data

Integers are little-endian; a string is its length in bytes followed by UTF-8. The reader of the
gguf package is not used because it builds several numpy arrays for every string, which takes 5 s
for a vocabulary of 49,152 tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.errors import CheckpointError
from jaxserve.text.model_files import check_file

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8

STRING, ARRAY = 8, 9
# Struct format of each scalar type in the metadata.
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = SCALARS[4], SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Locates a tensor in the file.

    Attributes:
      name: GGUF name.
      type: storage type.
      shape: shape in numpy order.
      offset: bytes from the start of the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one stored row, a whole number of quantisation blocks."""
        block_elements, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block_elements * block_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the stored tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """A GGUF file. Opening it reads metadata and tensor entries and checks that they are complete.

    Attributes:
      path: the file.
      metadata: scalars, strings and lists by key.
      tensors: entries by name, in the order of the file.

    Raises:
      CheckpointError: the file is incomplete, damaged or not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_file(path)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(path, self._map)
        self.metadata, num_tensors = header.metadata()
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self.tensors = header.tensors(num_tensors, alignment)

    def read(self, tensor: GGUFTensor) -> np.ndarray:
        """Returns the stored bytes of a tensor, ``u8[rows, row_bytes]``: a view of the file."""
        data = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return data.reshape(-1, tensor.row_bytes)


class _Header:
    """Reads the metadata and the tensor entries, in this order, from the start of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def metadata(self) -> tuple[dict[str, Any], int]:
        """Reads the metadata fields, and returns them and the number of tensors."""
        if (magic := self._data[:4]) != b"GGUF":
            hint = "a git-lfs pointer; run `git lfs pull`" if magic == b"vers" else repr(magic)
            raise CheckpointError(f"{self._path} is not a GGUF file: it starts with {hint}")
        self._at = 4
        version = self._scalar(U32)
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; expected little-endian version "
                f"{' or '.join(map(str, VERSIONS))}"
            )
        num_tensors, num_fields = self._scalar(U64), self._scalar(U64)
        fields = {}
        for _ in range(num_fields):
            key = self._string()
            fields[key] = self._value(self._scalar(U32))
        return fields, num_tensors

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """Reads the tensor entries, which follow the metadata."""
        entries = [self._tensor_entry() for _ in range(count)]
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(
                f"general.alignment must be a whole number above 0, got {alignment!r:.100}"
            )
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, type_id, shape, offset in entries:
            if name in tensors:
                raise self._damaged(f"it has tensor {name} twice")
            tensor = GGUFTensor(name, self._type(name, type_id), shape, data_start + offset)
            block_elements, _ = GGML_QUANT_SIZES[tensor.type]
            if shape[-1] % block_elements:
                raise self._damaged(
                    f"tensor {name} has rows of {shape[-1]} elements; expected a multiple of "
                    f"{block_elements}"
                )
            end = tensor.offset + tensor.num_bytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{self._path} is cut short: tensor {name} ends at byte {end}, the file has "
                    f"{len(self._data)}; copy or download it again"
                )
            tensors[name] = tensor
        return tensors

    def _tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dimensions = self._scalar(U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(
                f"tensor {name} has {num_dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(self._scalar(U64) for _ in range(num_dimensions))
        if 0 in shape:
            raise self._damaged(f"tensor {name} is empty: its shape is {shape[::-1]}")
        return name, self._scalar(U32), shape[::-1], self._scalar(U64)

    def _type(self, name: str, type_id: int) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name} has the unknown type {type_id}"
            ) from error

    def _value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self._string()
        if type_id in SCALARS:
            return self._scalar(SCALARS[type_id])
        if type_id != ARRAY:
            raise self._damaged(f"a field has the unknown type {type_id}")
        item_type, count = self._scalar(U32), self._scalar(U64)
        if item_type == STRING:
            self._check_left(count * U64.size)
            return [self._string() for _ in range(count)]
        if item_type not in SCALARS:
            raise self._damaged(f"a list has items of the unknown type {item_type}")
        item = SCALARS[item_type]
        self._check_left(count * item.size)
        values = struct.unpack_from(f"<{count}{item.format[1:]}", self._data, self._at)
        self._at += count * item.size
        return list(values)

    def _scalar(self, form: struct.Struct) -> Any:
        self._check_left(form.size)
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def _string(self) -> str:
        length = self._scalar(U64)
        self._check_left(length)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a string is not UTF-8: {raw[:40]!r}") from error

    def _check_left(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise CheckpointError(
                f"{self._path} is cut short or damaged: expected {num_bytes} more bytes at byte "
                f"{self._at}, found {len(self._data) - self._at}; copy or download it again"
            )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}")

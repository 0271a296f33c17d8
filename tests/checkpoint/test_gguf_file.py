"""GGUF files: metadata, tensors, alignment, and damaged files."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.errors import CheckpointError

ARRAYS = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "f16": np.arange(5, dtype=np.float16),
    "cube": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
}


@pytest.fixture
def complete_file(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -3000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("float", 0.1)
    writer.add_float64("double", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße 🔥")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, 0.25])
    writer.add_array("flags", [True, False])
    for name, array in ARRAYS.items():
        writer.add_tensor(name, array)
    rows = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("quantised", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_the_same_as_the_gguf_package(complete_file: Path) -> None:
    expected = gguf.GGUFReader(complete_file)
    file = GGUFFile(complete_file)
    fields = {k: f.contents() for k, f in expected.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert len(fields) == 17
    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        own = file.tensors[tensor.name]
        assert own.type == tensor.tensor_type
        assert list(own.shape) == tensor.shape.tolist()[::-1]
        assert own.num_bytes == tensor.n_bytes
        assert file.read(own).tobytes() == tensor.data.tobytes()


def test_read_returns_read_only_rows(complete_file: Path) -> None:
    file = GGUFFile(complete_file)
    assert file.read(file.tensors["quantised"]).shape == (2, 36)
    assert file.read(file.tensors["cube"]).shape == (6, 16)
    with pytest.raises(ValueError, match="read-only"):
        file.read(file.tensors["f32"])[0] = 0


def test_reads_a_custom_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(128)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(3, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    for i in range(3):
        assert file.tensors[f"t{i}"].offset % 128 == 0
        assert (file.read(file.tensors[f"t{i}"]).view(np.float32) == i).all()


def test_rejects_a_file_truncated_anywhere(complete_file: Path, tmp_path: Path) -> None:
    data = complete_file.read_bytes()
    (tmp_path / "cut").write_bytes(data)
    last = max(GGUFFile(complete_file).tensors.values(), key=lambda tensor: tensor.offset)
    for length in range(0, last.offset + last.num_bytes, 3):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="cut short|empty|not a GGUF file"):
            GGUFFile(tmp_path / "cut")


def test_random_damage_raises_checkpoint_errors_only(complete_file: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    data = complete_file.read_bytes()
    header = min(tensor.offset for tensor in GGUFFile(complete_file).tensors.values())
    rejected = 0
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            file = GGUFFile(tmp_path / "damaged")
            for tensor in file.tensors.values():
                file.read(tensor).tobytes()
        except CheckpointError:
            rejected += 1
    assert rejected > 100


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def container(*parts: bytes, tensors: int = 0, fields: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, fields)
    return head + b"".join(parts) + bytes(256)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 something", "not a GGUF file: it starts with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (container(version=1), "version 1; expected"),
        (container(version=0x03000000), "little-endian"),
        (container(text("k"), struct.pack("<I", 99), fields=1), "unknown type 99"),
        (container(text("k"), struct.pack("<IIQ", 9, 9, 1), fields=1), "items of the unknown"),
        (container(text("k"), struct.pack("<IIQ", 9, 8, 2**60), fields=1), "cut short or damaged"),
        (container(text("k"), struct.pack("<IIQ", 9, 0, 2**60), fields=1), "cut short or damaged"),
        (container(struct.pack("<Q", 2) + b"\xff\xff", fields=1), "not UTF-8"),
        (container(tensor("t"), tensors=1), "t has 0 dimensions; expected 1 to 8"),
        (container(tensor("t", *[1] * 9), tensors=1), "t has 9 dimensions"),
        (container(tensor("t", 4, 0), tensors=1), "t is empty"),
        (container(tensor("t", 4, kind=77), tensors=1), "t has the unknown type 77"),
        (
            container(tensor("t", 33, kind=2), tensors=1),
            "rows of 33 elements; expected a multiple of 32",
        ),
        (container(tensor("t", 2**40), tensors=1), "tensor t ends at byte"),
        (container(tensor("t", 4, offset=10_000), tensors=1), "tensor t ends at byte"),
        (container(tensor("t", 4), tensor("t", 4), tensors=2), "tensor t twice"),
        (
            container(text("general.alignment"), struct.pack("<II", 4, 0), fields=1),
            "general.alignment must be a whole number above 0, got 0",
        ),
    ],
)
def test_rejects_damaged_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "x.gguf")

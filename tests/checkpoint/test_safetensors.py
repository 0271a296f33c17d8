"""Safetensors files: dtypes, views of the file, and damaged files."""

import json
import random
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.safetensors import SafetensorsFile
from jaxserve.errors import CheckpointError

DTYPES = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16),
    *(np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8, np.bool_),
]


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = {
        f"{np.dtype(dtype).name}.{i}": np.asarray(8 * rng.standard_normal(shape)).astype(dtype)
        for dtype in DTYPES
        for i, shape in enumerate([(), (1,), (3, 5), (2, 3, 4), (0, 4)])
    }
    save_file(given, tmp_path / "all.safetensors")
    file = SafetensorsFile(tmp_path / "all.safetensors")
    read = dict(file.read(list(file.entries)))
    assert read.keys() == given.keys()
    for name, array in given.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()
        assert file.entries[name].num_bytes == array.nbytes


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    save_file({f"w{i}": np.ones((1024, 1024), np.float32) for i in range(4)}, tmp_path / "w")
    file = SafetensorsFile(tmp_path / "w")
    tracemalloc.start()
    total = sum(float(array[0, 0]) for _, array in file.read(list(file.entries)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 4
    assert peak < 1_000_000  # one tensor has 4 MiB
    (_, array), *_ = file.read(["w0"])
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 2


def test_reads_data_at_an_odd_offset(tmp_path: Path) -> None:
    header = json.dumps(entry()).encode()
    header += b" " * (1 - len(header) % 2)  # an odd header length puts the data at an odd offset
    values = np.array([1.5, -2.0], np.float32)
    path = write_raw(tmp_path / "odd", header, values.tobytes())
    ((_, array),) = SafetensorsFile(path).read(["w"])
    np.testing.assert_array_equal(array, values)


def test_reads_tensors_in_the_order_of_their_data(tmp_path: Path) -> None:
    header = {
        "late": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
        "__metadata__": {"format": "pt"},
        "early": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "w", header, b"abcd"))
    assert [(n, a.tobytes()) for n, a in file.read(list(file.entries))] == [
        ("early", b"ab"),
        ("late", b"cd"),
    ]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{x", "damaged header"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe{}", "damaged header"),
        ({"w": 5}, "entry of tensor w"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "entry of tensor w"),
        (entry(offsets=(0,)), "entry of tensor w"),
        (entry(shape=(-2,)), "entry of tensor w"),
        (entry(shape=("2",)), "entry of tensor w"),
        (entry(shape=(3,)), "needs 12 bytes, but its range has 8"),
        (entry(offsets=(8, 0)), "needs 8 bytes, but its range has -8"),
        (entry(dtype="F8_E4M3", offsets=(0, 2)), "dtype F8_E4M3, which is not supported"),
        (entry(offsets=(100, 108)), "cut short"),
    ],
)
def test_rejects_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(write_raw(tmp_path / "w", header, bytes(8)))


def test_rejects_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        SafetensorsFile(tmp_path / "w")


def test_rejects_a_file_truncated_anywhere(tmp_path: Path) -> None:
    save_file({"a": np.arange(6.0), "b": np.ones((2, 2), np.float16)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "cut")


def test_random_damage_raises_checkpoint_errors_only(tmp_path: Path) -> None:
    rng = random.Random(0)
    save_file({"a": np.arange(6.0), "b": np.ones((2, 2), np.float16)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    rejected = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(whole) - 56)] = rng.randrange(256)  # not in the data
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            file = SafetensorsFile(tmp_path / "damaged")
            for _, array in file.read(list(file.entries)):
                array.tobytes()
        except CheckpointError:
            rejected += 1
    assert rejected > 200

"""GGUF block formats, compared with unpacking value by value as ggml defines them."""

import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.checkpoint import gguf_dequantize
from jaxserve.checkpoint.gguf_dequantize import dequantize, output_dtype

Kind = GGMLQuantizationType


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def nibble(data: bytes, i: int) -> int:
    """Returns value i of 32 in 16 bytes; the low halves come first."""
    return data[i % 16] & 15 if i < 16 else data[i % 16] >> 4


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (nibble(block[2:], i) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * nibble(block[4:], i) + half(block, 2) for i in range(32)]


def fifth_bit(block: bytes, at: int, i: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> i & 1) << 4


def q5_0(block: bytes) -> list[float]:
    return [
        half(block, 0) * ((nibble(block[6:], i) | fifth_bit(block, 2, i)) - 16) for i in range(32)
    ]


def q5_1(block: bytes) -> list[float]:
    return [
        half(block, 0) * (nibble(block[8:], i) | fifth_bit(block, 4, i)) + half(block, 2)
        for i in range(32)
    ]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * (value - 256 if value > 127 else value) for value in block[2:]]


def scale_and_min(scales: bytes, j: int) -> tuple[int, int]:
    """Returns scale and minimum, six bits each, of one of the eight groups of a block of 256."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (
        scales[j + 4] & 15 | (scales[j - 4] >> 6) << 4,
        scales[j + 4] >> 4 | (scales[j] >> 6) << 4,
    )


def q4_k(block: bytes) -> list[float]:
    values = []
    for j in range(8):
        scale, low = scale_and_min(block[4:16], j)
        packed = block[16 + j // 2 * 32 : 16 + j // 2 * 32 + 32]
        quant = [byte >> 4 if j % 2 else byte & 15 for byte in packed]
        values += [half(block, 0) * scale * q - half(block, 2) * low for q in quant]
    return values


def q5_k(block: bytes) -> list[float]:
    values = []
    for j in range(8):
        scale, low = scale_and_min(block[4:16], j)
        packed = block[48 + j // 2 * 32 : 48 + j // 2 * 32 + 32]
        for i, byte in enumerate(packed):
            q = (byte >> 4 if j % 2 else byte & 15) | (block[16 + i] >> j & 1) << 4
            values.append(half(block, 0) * scale * q - half(block, 2) * low)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], block[192:208]
    values = []
    for i in range(256):
        part, at = divmod(i, 128)
        quarter, column = divmod(at, 32)
        byte = low[64 * part + column + 32 * (quarter % 2)]
        q = byte >> 4 if quarter >= 2 else byte & 15
        q |= (high[32 * part + column] >> 2 * quarter & 3) << 4
        scale = scales[i // 16]
        values.append(half(block, 208) * (scale - 256 if scale > 127 else scale) * (q - 32))
    return values


# The values that the 16 codes of iq4_nl stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes) -> list[float]:
    return [half(block, 0) * IQ4_VALUES[nibble(block[2:], i)] for i in range(32)]


# For each kind: a function that unpacks one block, and the offsets of its float16 numbers.
REFERENCES = {
    Kind.Q4_0: (q4_0, [0]),
    Kind.Q4_1: (q4_1, [0, 2]),
    Kind.Q5_0: (q5_0, [0]),
    Kind.Q5_1: (q5_1, [0, 2]),
    Kind.Q8_0: (q8_0, [0]),
    Kind.Q4_K: (q4_k, [0, 2]),
    Kind.Q5_K: (q5_k, [0, 2]),
    Kind.Q6_K: (q6_k, [208]),
    Kind.IQ4_NL: (iq4_nl, [0]),
}


ROWS, BLOCKS_IN_ROW = 7, 3


def random_blocks(kind: Kind, halves: list[int]) -> np.ndarray:
    """Returns rows of random bytes, with finite float16 numbers at these offsets of each block."""
    rng = np.random.default_rng(int(kind))
    _, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * BLOCKS_IN_ROW, size), dtype=np.uint8)
    for at in halves:
        numbers = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", REFERENCES, ids=lambda kind: kind.name)
def test_dequantizes_random_blocks(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack, halves = REFERENCES[kind]
    elements, _ = GGML_QUANT_SIZES[kind]
    data = random_blocks(kind, halves)
    blocks = data.reshape(ROWS * BLOCKS_IN_ROW, -1)
    expected = np.array([unpack(block.tobytes()) for block in blocks]).reshape(ROWS, -1)
    monkeypatch.setattr(gguf_dequantize, "CHUNK_ELEMENTS", 4 * elements)  # a last chunk of one
    values = dequantize(data, kind)
    assert values.dtype == output_dtype(kind) == np.float32
    assert values.shape == (ROWS, BLOCKS_IN_ROW * elements)
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_dequantized_values_are_close_to_the_original(kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    data = quants.quantize(values, kind)
    error = np.abs(dequantize(data, kind) - values).max()
    assert error < {Kind.Q4_0: 0.6, Kind.Q4_1: 0.3, Kind.Q8_0: 0.03}.get(kind, 0.3)
    np.testing.assert_array_equal(dequantize(data, kind), quants.dequantize(data, kind))


def test_unquantised_types_are_views() -> None:
    values = np.random.default_rng(0).standard_normal((3, 8), np.float32)
    for kind, dtype in ((Kind.F32, np.float32), (Kind.F16, np.float16)):
        stored = values.astype(dtype)
        result = dequantize(stored.view(np.uint8), kind)
        assert result.dtype == dtype
        assert np.shares_memory(result, stored)
        np.testing.assert_array_equal(result, stored)
    stored = quants.quantize(values, Kind.BF16)
    result = dequantize(stored, Kind.BF16)
    assert result.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(result, stored)
    np.testing.assert_array_equal(result, values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    "kind",
    [Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_XS],
    ids=lambda kind: kind.name,
)
def test_dequantizes_types_with_lookup_tables_like_the_package(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_blocks(kind, [0])
    elements, _ = GGML_QUANT_SIZES[kind]
    monkeypatch.setattr(gguf_dequantize, "CHUNK_ELEMENTS", 4 * elements)
    values = dequantize(data, kind)  # before the package has a reason to load its table
    assert values.dtype == np.float32
    assert len(np.unique(values)) > elements / 4
    np.testing.assert_array_equal(values, quants.dequantize(data, kind))


def test_rejects_types_that_cannot_be_dequantized() -> None:
    with pytest.raises(NotImplementedError, match="Q8_1"):
        dequantize(np.zeros((1, GGML_QUANT_SIZES[Kind.Q8_1][1]), np.uint8), Kind.Q8_1)

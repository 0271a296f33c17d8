"""Tile sizes, and the number of parts of a context."""

from __future__ import annotations

import itertools

import pytest

from pallas_kernels import limits, tuning


@pytest.mark.parametrize("kernel", [tuning.DECODE, tuning.RAGGED])
def test_every_supported_call_has_a_configuration(kernel):
    groups = (1, 3, 16, 71, limits.MAX_GROUP)
    for head_dim, group, dtype in itertools.product(limits.HEAD_DIMS, groups, limits.DTYPES):
        config = tuning.kernel_config(
            kernel, head_dim=head_dim, group=group, dtype=dtype, device="NVIDIA H200"
        )
        for size in (config.block_m, config.block_n):
            assert size >= 16
            assert size & (size - 1) == 0


def test_wide_operands_get_smaller_tiles():
    narrow, wide = (
        tuning.kernel_config(tuning.RAGGED, head_dim=128, group=4, dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    assert wide.block_n < narrow.block_n


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "max_context", "expected"),
    [
        (1, 8, 65536, 33),  # 264 programs for 132 multiprocessors
        (8, 8, 65536, 4),
        (8, 3, 65536, 11),
        (16, 8, 65536, 2),
        (32, 8, 65536, 1),  # the rows fill the device
        (1024, 8, 65536, 1),
        (1, 8, 256, 4),  # no part is shorter than a tile
        (1, 8, 16, 1),
        (1, 1, 65536, 64),  # the limit of the merge pass
    ],
)
def test_parts_fill_the_device_about_twice(num_rows, num_kv_heads, max_context, expected):
    parts = tuning.decode_splits(
        num_rows=num_rows, num_kv_heads=num_kv_heads, max_context=max_context, block_n=64
    )
    assert parts == expected

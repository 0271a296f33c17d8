"""KV cache: the size of a token, and the dtype."""

import jax
import pytest

from jaxserve.device import Device
from jaxserve.runner.kv_cache import allocate, bytes_per_token, cache_dtype


def test_bytes_per_token_equal_the_size_of_the_arrays():
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    kv = allocate(**shape, num_blocks=5, block_size=4)
    assert kv.k.shape == kv.v.shape == (3, 5, 4, 2, 8)
    assert kv.k.nbytes + kv.v.nbytes == bytes_per_token(**shape) * 5 * 4


@pytest.mark.parametrize(
    ("platform", "version", "expected"),
    [
        ("cpu", (0, 10, 2), "float32"),
        ("cpu", (0, 11, 0), "bfloat16"),
        ("gpu", (0, 10, 2), "bfloat16"),
    ],
)
def test_bfloat16_cache_is_widened_where_writing_to_it_is_slow(
    monkeypatch, platform, version, expected
):
    monkeypatch.setattr(jax, "__version_info__", version)
    device = Device(platform, "a device", 0, has_native_bf16=True)
    assert cache_dtype("bfloat16", device) == expected
    assert cache_dtype("float16", device) == "float16"

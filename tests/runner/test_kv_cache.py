"""KV cache: the size of a token, and the dtype."""

import jax
import pytest

from jaxserve.device import CPU, Device
from jaxserve.errors import ConfigError
from jaxserve.runner.kv_cache import abstract, allocate, bytes_per_token, cache_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_bytes_per_token_equal_the_size_of_the_arrays(dtype):
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": dtype}
    kv = allocate(abstract(**shape, num_blocks=5, block_size=4))
    assert kv.k.shape == kv.v.shape == (3, 5, 4, 2, 8)
    assert kv.k.dtype == kv.v.dtype == ("uint8" if dtype == "float8_e4m3fn" else dtype)
    if dtype == "int8":
        assert kv.k_scale.shape == kv.v_scale.shape == (3, 5, 4, 2)
    assert sum(x.nbytes for x in jax.tree.leaves(kv)) == bytes_per_token(**shape) * 5 * 4


def test_8_bit_caches_take_about_half_the_memory():
    shape = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}  # SmolLM2-135M
    sizes = {
        dtype: bytes_per_token(**shape, dtype=dtype)
        for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn")
    }
    assert list(sizes.values()) == [46080, 23040, 12240, 11520]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
    ],
)
def test_the_cache_has_the_dtype_that_is_asked_for(asked, expected):
    assert cache_dtype(asked, "bfloat16", CPU) == (expected, "as asked")


def test_rejects_an_unknown_dtype():
    message = "--kv-cache-dtype must be one of auto, .*int8, fp8, fp8_e4m3, got 'fp4'"
    with pytest.raises(ConfigError, match=message):
        cache_dtype("fp4", "float32", CPU)


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
    dtype, why = cache_dtype("auto", "bfloat16", device)
    assert dtype == expected
    assert ("slow to write" in why) == (expected == "float32")
    assert cache_dtype("auto", "float16", device) == ("float16", "that of the activations")

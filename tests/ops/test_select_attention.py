"""Selection of an attention backend for a model and a device, and the reason that is given."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from jaxserve.device import Device
from jaxserve.errors import ConfigError
from jaxserve.ops.attention import AttentionBackend, AttentionShape, KVCache, load, select
from jaxserve.ops.xla_attention import attend, write

CPU = Device(platform="cpu", kind="some CPU", free_bytes=0, has_native_bf16=False)
GPU = Device("gpu", "NVIDIA H200", 0, True, compute_capability=(9, 0), num_cores=132)
OLD_GPU = replace(GPU, kind="Tesla V100", compute_capability=(7, 0))
AMPERE = replace(GPU, kind="NVIDIA A100", compute_capability=(8, 0))
OTHER_GPU = replace(GPU, kind="gfx942", compute_capability=None, num_cores=None)
SHAPE = AttentionShape(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype="bfloat16",
    cache_dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("device", "changes", "name", "why"),
    [
        (CPU, {}, "xla", "some CPU"),
        (GPU, {}, "pallas_triton", "kernels for NVIDIA H200"),
        (AMPERE, {}, "pallas_triton", "kernels for NVIDIA A100"),
        (OLD_GPU, {}, "xla", "needs compute capability 8.0 or newer, got Tesla V100"),
        (OTHER_GPU, {}, "xla", "needs an NVIDIA GPU"),
        (GPU, {"head_dim": 72}, "xla", "head_dim 72 is not supported"),
        (GPU, {"cache_dtype": "float8_e4m3fn"}, "pallas_triton", "kernels for NVIDIA H200"),
        (AMPERE, {"cache_dtype": "float8_e4m3fn"}, "xla", "capability 8.9 or newer"),
        (GPU, {"cache_dtype": "int8"}, "pallas_triton", "kernels for NVIDIA H200"),
        (AMPERE, {"cache_dtype": "int8"}, "pallas_triton", "kernels for NVIDIA A100"),
    ],
)
def test_auto_selects_a_backend_for_the_model_and_the_device(device, changes, name, why):
    backend, reason = select("auto", device, replace(SHAPE, **changes))
    assert backend.name == name
    assert why in reason


@pytest.mark.parametrize("name", ["xla", "pallas_triton"])
def test_selects_a_backend_by_name(name: str):
    backend, reason = select(name, GPU, SHAPE)
    assert (backend.name, reason) == (name, "as asked")


def test_kernels_on_a_cpu_are_reported_as_interpreted():
    backend, reason = select("pallas_triton", CPU, SHAPE)
    assert backend.name == "pallas_triton"
    assert reason == "as asked, interpreted, which is slow: there is no GPU"


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        (GPU, {"head_dim": 72}, "head_dim 72 is not supported: expected one of 16, 32, 64, 80"),
        (GPU, {"block_size": 24}, "block_size 24 is not supported: expected one of 4, 8, 16"),
        (GPU, {"dtype": "float64"}, "dtype float64 is not supported: expected one of bfloat16"),
        (GPU, {"num_heads": 1032}, "at most 128 query heads"),
        (
            AMPERE,
            {"cache_dtype": "float8_e4m3fn"},
            "float8_e4m3fn needs .* 8.9 or newer, got .*A100",
        ),
        (OLD_GPU, {}, "needs compute capability 8.0 or newer, got Tesla V100"),
    ],
)
def test_rejects_the_kernels_for_a_model_or_device_that_they_do_not_support(
    device, changes, message
):
    with pytest.raises(ConfigError, match=message):
        select("pallas_triton", device, replace(SHAPE, **changes))


def test_rejects_an_unknown_backend_and_lists_the_names():
    with pytest.raises(ConfigError, match="'flash'.*auto or one of xla, pallas_triton"):
        select("flash", CPU, SHAPE)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_a_backend_must_declare_that_it_reads_8_bit_caches(cache_dtype):
    backend = AttentionBackend("example", write=write, attend=attend)
    backend.check(replace(SHAPE, cache_dtype="float32"))
    with pytest.raises(ConfigError, match=f"cannot read a cache of {cache_dtype}"):
        backend.check(replace(SHAPE, cache_dtype=cache_dtype))


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_rejects_an_8_bit_cache_that_the_kernels_cannot_address(cache_dtype):
    def cache(num_blocks: int) -> KVCache:
        array = jax.ShapeDtypeStruct((4, num_blocks, 16, 8, 128), cache_dtype)  # 64 KiB a block
        return KVCache(array, array)

    check = load("pallas_triton", GPU).check_cache
    for num_blocks in (2**15, 2**16 + 1):
        check(cache(num_blocks))
    message = "got 3.00 GiB; change .* --num-blocks, to at most 32768 or at least 65537"
    with pytest.raises(ConfigError, match=message):
        check(cache(3 * 2**14))
    load("xla", GPU).check_cache(cache(3 * 2**14))

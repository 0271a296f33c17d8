"""Sizes of an engine: defaults, memory, and settings that are rejected."""

import dataclasses
import itertools

import pytest

from jaxserve.config import (
    GIB,
    MIB,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from jaxserve.device import Device
from jaxserve.engine.sizing import resolve_dtype, resolve_sizes
from jaxserve.errors import ConfigError

CPU = Device("cpu", "a CPU", free_bytes=8 * GIB, has_native_bf16=False)
GPU = Device("gpu", "a GPU", free_bytes=60 * GIB, has_native_bf16=True)


def sizes(device: Device = CPU, *, context: int = 2048, token_bytes: int = 1024, **groups):
    return resolve_sizes(
        EngineConfig(**groups), device, context_length=context, bytes_per_token=token_bytes
    )


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", GPU, "bfloat16"),
        ("auto", dataclasses.replace(GPU, has_native_bf16=False), "float16"),
        ("auto", CPU, "float32"),
        ("auto", dataclasses.replace(CPU, has_native_bf16=True), "bfloat16"),
        ("float16", CPU, "float16"),
        ("float32", GPU, "float32"),
    ],
)
def test_resolves_the_dtype(asked, device: Device, expected: str) -> None:
    dtype, decision = resolve_dtype(ModelConfig(dtype=asked), device)
    assert dtype == expected
    assert (decision is None) == (asked != "auto")


def test_defaults_depend_on_the_platform() -> None:
    cpu, gpu = sizes(CPU), sizes(GPU)
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 512)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 8192)


def test_resolve_sizes_does_not_change_the_config() -> None:
    config = EngineConfig()
    before = dataclasses.asdict(config)
    resolve_sizes(config, CPU, context_length=512, bytes_per_token=64)
    assert dataclasses.asdict(config) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.model = "other"  # type: ignore[misc]


def test_pool_is_no_larger_than_the_requests_can_use() -> None:
    # 64 requests of 2048 tokens take 8192 blocks; 128 MiB at 1 KiB a token, well within memory.
    assert sizes().num_blocks == 64 * 128 + 1


def test_pool_on_a_cpu_takes_768_mib_by_default() -> None:
    # 64 KiB a token: 64 full requests would take 8 GiB.
    result = sizes(token_bytes=64 * 1024)
    assert (result.num_blocks - 1) * 16 * 64 * 1024 == 768 * MIB


def test_pool_on_a_cpu_grows_for_one_long_request() -> None:
    # One request of 32768 tokens takes 1 GiB at 32 KiB a token, more than the default of 768 MiB.
    result = sizes(context=32768, token_bytes=32 * 1024)
    assert result.max_model_len == 32768
    assert (result.num_blocks - 1) * 16 == 32768


def test_pool_on_a_gpu_takes_the_free_memory() -> None:
    result = sizes(GPU, context=131072, token_bytes=256 * 1024)
    assert result.num_blocks == 60 * GIB // (16 * 256 * 1024) + 1


def test_reduces_the_context_to_fit_the_memory_and_reports_the_reason() -> None:
    result = sizes(dataclasses.replace(CPU, free_bytes=2 * GIB), context=131072, token_bytes=65536)
    assert result.max_model_len == (result.num_blocks - 1) * 16 == GIB // 65536
    context = next(d for d in result.decisions if d.what == "context")
    assert "reduced from the model's 131072" in context.why


def test_uses_the_configured_sizes() -> None:
    result = sizes(
        model=ModelConfig(max_model_len=100),
        cache=CacheConfig(num_blocks=9, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=7),
    )
    assert dataclasses.astuple(result)[:5] == (100, 16, 9, 3, 7)


def test_rejects_a_context_that_does_not_fit_and_names_the_largest_that_fits() -> None:
    with pytest.raises(ConfigError, match="the largest that fits is 128"):
        sizes(model=ModelConfig(max_model_len=129), cache=CacheConfig(num_blocks=9))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"model": ModelConfig(max_model_len=4096)}, "context of 2048"),
        ({"model": ModelConfig(max_model_len=0)}, "--max-model-len must be at least 1, got 0"),
        ({"cache": CacheConfig(block_size=-1)}, "--block-size"),
        ({"cache": CacheConfig(num_blocks=1)}, "--num-blocks must be at least 2"),
        ({"cache": CacheConfig(kv_cache_memory_mib=0)}, "--kv-cache-memory-mib"),
        ({"cache": CacheConfig(memory_fraction=0.0)}, "--memory-fraction must be in"),
        ({"cache": CacheConfig(memory_fraction=1.1)}, "--memory-fraction must be in"),
        ({"scheduler": SchedulerConfig(max_num_seqs=0)}, "--max-num-seqs"),
        (
            {"scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)},
            "--max-num-batched-tokens 7 must be at least --max-num-seqs",
        ),
    ],
)
def test_rejects_impossible_settings(groups, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(**groups)


def test_rejects_a_device_without_memory_for_a_cache() -> None:
    with pytest.raises(ConfigError, match="no memory for a KV cache"):
        sizes(dataclasses.replace(GPU, free_bytes=1000))


def test_resolved_sizes_always_fit() -> None:
    memory = (MIB, 100 * MIB, 3 * GIB, 80 * GIB)
    for free, context, token_bytes, block_size, device in itertools.product(
        memory, (16, 1000, 131072), (100, 70_000), (1, 16, 128), (CPU, GPU)
    ):
        device = dataclasses.replace(device, free_bytes=free)
        cache = CacheConfig(block_size=block_size)
        try:
            result = sizes(device, context=context, token_bytes=token_bytes, cache=cache)
        except ConfigError:
            assert free <= 20 * block_size * token_bytes
            continue
        assert (result.num_blocks - 1) * block_size * token_bytes <= free
        assert 1 <= result.max_model_len <= context
        assert result.max_model_len <= (result.num_blocks - 1) * block_size

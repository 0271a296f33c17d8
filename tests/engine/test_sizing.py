"""Sizes of an engine: defaults, memory, and settings that are rejected."""

import dataclasses
import errno
import itertools

import jax
import pytest

from jaxserve.config import (
    GIB,
    MIB,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.core.block_pool import BlockPool
from jaxserve.core.cache_groups import CacheGroups
from jaxserve.core.kv_cache_manager import KVCacheManager
from jaxserve.core.plan import Sizes
from jaxserve.core.request import Request
from jaxserve.device import Device
from jaxserve.engine.memory import after_weights, check_room_for_steps, explained
from jaxserve.engine.sizing import resolve_dtype, resolve_sizes
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Submit
from jaxserve.models.cache_layout import CacheLayout
from jaxserve.sampling_params import SamplingParams

CPU = Device("cpu", "a CPU", free_bytes=8 * GIB, has_native_bf16=False)
GPU = Device("gpu", "a GPU", free_bytes=60 * GIB, has_native_bf16=True)
GPU_20 = dataclasses.replace(GPU, free_bytes=20 * GIB)


def sizes(
    device: Device = CPU,
    *,
    context: int = 2048,
    token_bytes: int = 1024,
    windows: tuple[int | None, ...] = (None,),
    **groups,
) -> Sizes:
    return resolve_sizes(
        EngineConfig(**groups),
        device,
        context_length=context,
        bytes_per_token=token_bytes,
        windows=windows,
    )


def prompt(num_tokens: int) -> Request:
    submit = Submit("a", [0] * num_tokens, SamplingParams(seed=0))
    return Request.from_submit(submit, order=0, context_length=num_tokens)


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
    with pytest.raises(ConfigError, match="no memory for a KV cache.*; 0 MiB are free"):
        sizes(dataclasses.replace(GPU, free_bytes=1000))


def test_the_free_memory_is_no_reason_for_a_cache_of_a_size_that_the_user_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"needs 2 blocks .* the cache has 1 \(as asked\)$"):
        sizes(GPU, windows=(None, 8), cache=CacheConfig(num_blocks=2))


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


class TestGroupsOfLayers:
    """A model like Gemma 3 1B: 26 layers, 22 with a window of 512, 1 KiB a token and layer."""

    LAYOUT = CacheLayout.of([None if i % 6 == 5 else 512 for i in range(26)])
    NUM_TOKENS = 32768

    def sizes(self, layout: CacheLayout, device: Device = GPU_20, **groups) -> Sizes:
        return sizes(
            device,
            context=self.NUM_TOKENS,
            token_bytes=layout.num_layers * 1024,
            windows=layout.windows,
            scheduler=SchedulerConfig(max_num_batched_tokens=2048),
            **groups,
        )

    def requests(self, result: Sizes) -> int:
        (text,) = [d.value for d in result.decisions if d.what == "KV cache"]
        return int(text.split(" = ")[2].removesuffix(" full-length requests"))

    def test_as_many_full_length_requests_fit_as_the_decision_says(self) -> None:
        result = self.sizes(self.LAYOUT)
        assert (self.LAYOUT.num_layers, len(result.windows)) == (4, 7)
        # One group keeps 2048 blocks. Each of the others sees 512 + 2048 - 1 positions in a step.
        each = 2048 + 6 * 161
        assert self.requests(result) == (result.num_blocks - 1) // each == 108
        assert result.num_blocks - 1 == 20 * GIB // (16 * 4 * 1024)
        pool = BlockPool(result.num_blocks)
        groups = CacheGroups(result.windows, result.block_size, result.max_num_batched_tokens)
        manager, count = KVCacheManager(pool, groups), 0
        while manager.allocate(prompt(self.NUM_TOKENS), self.NUM_TOKENS) is not None:
            count += 1
        assert count == 108

    def test_the_same_memory_holds_more_requests_than_without_groups(self) -> None:
        one_group = CacheLayout((None,), 26, tuple((0, i) for i in range(26)))
        assert self.requests(self.sizes(one_group)) == 24
        assert self.requests(self.sizes(self.LAYOUT)) == 108

    def test_the_tokens_are_those_of_full_length_requests(self) -> None:
        result = self.sizes(self.LAYOUT, cache=CacheConfig(num_blocks=1 + 3 * 3014 + 1507))
        (decision,) = [d for d in result.decisions if d.what == "KV cache"]
        assert decision.value == "10550 blocks = 114688 tokens = 3 full-length requests"
        assert decision.why.endswith("; 7 groups of layers")

    def test_reduces_the_context_to_what_all_groups_can_hold(self) -> None:
        result = self.sizes(self.LAYOUT, cache=CacheConfig(num_blocks=1 + 1000 + 6 * 161))
        assert result.max_model_len == 16000
        result = self.sizes(self.LAYOUT, cache=CacheConfig(num_blocks=1 + 7 * 5 + 6))
        assert result.max_model_len == 5 * 16
        with pytest.raises(ConfigError, match="a request needs 7 blocks .* and the cache has 6"):
            self.sizes(self.LAYOUT, cache=CacheConfig(num_blocks=7))

    def test_a_pool_on_a_cpu_grows_for_one_long_request(self) -> None:
        layout = CacheLayout(self.LAYOUT.windows, 32, ())
        result = self.sizes(layout, CPU)
        assert result.num_blocks == 1 + 2048 + 6 * 161
        assert self.requests(result) == 1


FULL_GPU = dataclasses.replace(
    GPU, free_bytes=4 * MIB, most_bytes=6 * MIB, limited_by="--memory-fraction of a GPU"
)
CONTAINER = dataclasses.replace(CPU, free_bytes=870 * MIB, limited_by="memory.max of the cgroup /c")


class TestTooLittleMemory:
    """PUB-01 and its kind: one sentence with the flag, the largest value and the limit."""

    @pytest.mark.parametrize(
        ("device", "cache", "message"),
        [
            (
                CONTAINER,
                {"num_blocks": 10**9},
                r"--num-blocks 1000000000 needs .* use at most 55680",
            ),
            (CONTAINER, {"kv_cache_memory_mib": 871}, r"--kv-cache-memory-mib 871 .* at most 870"),
            # What the user asks for may exceed --memory-fraction, but not the pool of jax.
            (FULL_GPU, {"num_blocks": 6 * 64 + 1}, r"--num-blocks 385 needs .* use at most 384"),
            (FULL_GPU, {"kv_cache_memory_mib": 7}, r"--kv-cache-memory-mib 7 .* use at most 6"),
        ],
    )
    def test_a_cache_that_does_not_fit(self, device, cache, message) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            sizes(device, cache=CacheConfig(**cache))
        assert device.limited_by in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_largest_values_fit(self) -> None:
        sizes(CONTAINER, cache=CacheConfig(num_blocks=55680))
        sizes(CONTAINER, cache=CacheConfig(kv_cache_memory_mib=870))
        sizes(FULL_GPU, cache=CacheConfig(num_blocks=384))

    def test_no_memory_at_all(self) -> None:
        nothing = dataclasses.replace(CONTAINER, free_bytes=10_000)
        with pytest.raises(ConfigError, match=r"--kv-cache-memory-mib.*") as caught:
            sizes(nothing)
        assert nothing.limited_by in str(caught.value)

    def test_the_cache_leaves_memory_for_steps(self) -> None:
        """Half would be 435 MiB of the 870 MiB."""
        found = sizes(CONTAINER, context=2**20)
        assert (found.num_blocks - 1) * 16 * 1024 == 358 * MIB
        tiny = sizes(dataclasses.replace(CONTAINER, free_bytes=80 * MIB), context=2**20)
        assert (tiny.num_blocks - 1) * 16 * 1024 == 10 * MIB

    def test_replicas_on_a_cpu_share_the_memory(self) -> None:
        large = dataclasses.replace(CPU, free_bytes=8 * GIB)
        two = sizes(large, context=2**30, parallel=ParallelConfig(data_parallel_size=2))
        assert (two.num_blocks - 1) * 16 * 1024 == 2 * GIB


class TestWeights:
    def test_weights_that_do_not_fit(self) -> None:
        with pytest.raises(ConfigError, match=r"take 871 MiB .* 870 MiB are free .*--quantization"):
            after_weights(CONTAINER, 871 * MIB)

    def test_what_they_leave(self) -> None:
        assert after_weights(CONTAINER, 70 * MIB).free_bytes == 800 * MIB
        left = after_weights(FULL_GPU, MIB)
        assert (left.free_bytes, left.most_bytes) == (3 * MIB, 5 * MIB)


class TestExplained:
    @pytest.mark.parametrize(
        "error",
        [
            MemoryError("no room"),
            OSError(errno.ENOMEM, "no room"),
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room"),
        ],
    )
    def test_a_lack_of_memory(self, error) -> None:
        message = r"out of memory while running \(.*no room\); lower --x"
        with pytest.raises(ConfigError, match=message), explained("running", "lower --x"):
            raise error

    def test_other_errors_are_not_changed(self) -> None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained("", ""):
            raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
        with pytest.raises(FileNotFoundError), explained("", ""):
            raise FileNotFoundError(errno.ENOENT, "no file")


def test_little_memory_for_steps_is_said_before_they_run(caplog) -> None:
    check_room_for_steps(CONTAINER, 400 * MIB)
    assert caplog.text == ""
    check_room_for_steps(dataclasses.replace(GPU, free_bytes=MIB), MIB)
    assert caplog.text == ""
    check_room_for_steps(CONTAINER, 700 * MIB)
    parts = ("700 MiB of KV cache", CONTAINER.limited_by, "--max-num-seqs", "a smaller model")
    for part in ("170 MiB", *parts):
        assert part in caplog.text
    for cache_mib, left in ((820, "50 MiB are left"), (900, "0 MiB are left")):
        with pytest.raises(ConfigError, match=left) as caught:
            check_room_for_steps(CONTAINER, cache_mib * MIB)
        assert CONTAINER.limited_by in str(caught.value)

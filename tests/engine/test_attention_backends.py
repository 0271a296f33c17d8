"""Attention backends in an engine: equal tokens, and settings that the kernels reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.engine.factory import build
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.tiny import tiny_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("compile_quickly")


def make_config(model: Path, backend: str, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=64, dtype="float32"),
        cache=CacheConfig(**{"num_blocks": 20, "block_size": 4} | cache),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=12),
        compile=CompileConfig(attention_backend=backend, warmup=False, compilation_cache_dir=""),
    )


def generate(config: EngineConfig) -> dict[str, list[int]]:
    """Returns six greedy tokens for a chunked prompt, one decoded beside it, and a waiting one."""
    core = build(config, 0, lambda _: None).core
    tokens: dict[str, list[int]] = {"long": [], "short": [], "late": []}
    for name, prompt in {"long": list(range(5, 36)), "short": [7], "late": [300, 4, 9]}.items():
        core.add(Submit(name, prompt, SamplingParams(temperature=0, max_tokens=6, seed=0)))
    now = 0.0
    while core.has_work:
        for output in core.step(now):
            tokens[output.request_id] += output.token_ids
        now += 1.0
    return tokens


def test_kernels_give_the_same_greedy_tokens_as_xla(tmp_path):
    model = write_checkpoint(tmp_path / "tiny")
    expected = generate(make_config(model, "xla"))
    assert [len(tokens) for tokens in expected.values()] == [6, 6, 6]
    assert len({token for tokens in expected.values() for token in tokens}) > 6
    assert generate(make_config(model, "pallas_triton")) == expected


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_kernels_and_xla_give_the_same_greedy_tokens_with_an_8_bit_cache(tmp_path, kv_cache_dtype):
    """Both quantise equal keys and values to equal entries, so only roundings of sums differ."""
    model = write_checkpoint(tmp_path / "tiny")
    expected, found = (
        generate(make_config(model, backend, kv_cache_dtype=kv_cache_dtype))
        for backend in ("xla", "pallas_triton")
    )
    assert [len(tokens) for tokens in expected.values()] == [6, 6, 6]
    assert found == expected


@pytest.mark.parametrize(
    ("model", "cache", "message"),
    [
        ({"head_dim": 24}, {}, "head_dim 24 is not supported: expected one of 16, 32, 64, 80"),
        ({}, {"block_size": 24}, "block_size 24 is not supported: expected one of 4, 8, 16"),
        (
            {"num_attention_heads": 129, "num_key_value_heads": 1},
            {},
            "at most 128 query heads may share a KV head, got 129",
        ),
    ],
)
def test_rejects_settings_that_the_kernels_do_not_support_before_loading_weights(
    model, cache, message, tmp_path
):
    tensors = {"not_a_weight": np.zeros(1, np.float32)}
    folder = write_checkpoint(tmp_path / "tiny", tiny_config(**model), tensors)
    with pytest.raises(ConfigError, match=f"pallas_triton cannot serve this: {message}"):
        build(make_config(folder, "pallas_triton", **cache), 0, lambda _: None)

"""N-gram speculation in whole engines: the same tokens in fewer steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from jaxserve.engine.core import BuiltEngine
from jaxserve.engine.factory import build
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.tiny import tiny_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("compile_quickly")

CONFIGS = {
    "llama": tiny_config("LlamaForCausalLM"),
    # Layers of two kinds, of which one gives blocks back behind its window.
    "gemma3": tiny_config(
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        num_hidden_layers=3,
        sliding_window=9,
        sliding_window_pattern=3,
        rope_parameters=None,
        query_pre_attn_scalar=16,
    ),
}
NGRAM = SpeculationConfig(speculative="ngram", num_speculative_tokens=4)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", CONFIGS[request.param])


def make_engine(model: Path, *, is_async: bool, speculation: SpeculationConfig) -> BuiltEngine:
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=128, dtype="float32"),
        cache=CacheConfig(num_blocks=120, block_size=4),
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=24, async_scheduling=is_async
        ),
        compile=CompileConfig(warmup=False, compilation_cache_dir=""),
        speculation=speculation,
    )
    return build(config, 0, lambda _: None)


def submits() -> list[Submit]:
    """Returns prompts that repeat themselves and prompts that do not, with various parameters."""
    rng = np.random.default_rng(3)
    some = rng.integers(0, 512, 7).tolist()
    prompts = [some * 5, rng.integers(0, 512, 40).tolist(), [9] * 30, [5]]
    params = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.3, "seed": 4, "logit_bias": dict.fromkeys(some, 8.0)},
        {"temperature": 1.0, "top_k": 3, "seed": 7, "logit_bias": {9: 30.0}, "logprobs": 0},
        {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": tuple(range(0, 512, 3))},
        {"temperature": 0.0, "logit_bias": {9: 30.0}, "frequency_penalty": 0.1},
    ]
    return [
        Submit(str(i), prompt, SamplingParams(**{"seed": i, "max_tokens": 30, **kind}))
        for i, (prompt, kind) in enumerate(itertools.product(prompts, params))
    ]


def run(built: BuiltEngine) -> dict[str, list[RequestOutput]]:
    """Runs the requests, a few at a time, so that there are rows for drafts."""
    outputs: dict[str, list[RequestOutput]] = {}
    waiting = submits()
    while waiting or built.core.has_work:
        while waiting and built.core.stats().num_running + built.core.stats().num_waiting < 3:
            built.core.add(waiting.pop())
        for output in built.core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_tokens_logprobs_and_ends_are_those_of_a_plain_engine(model):
    plain = run(make_engine(model, is_async=True, speculation=SpeculationConfig()))
    for is_async in (True, False):
        built = make_engine(model, is_async=is_async, speculation=NGRAM)
        outputs = run(built)
        for name, expected in plain.items():
            assert tokens_of(outputs[name]) == tokens_of(expected)
            last, wanted = outputs[name][-1], expected[-1]
            assert (last.finish_reason, last.stop_reason) == (
                wanted.finish_reason,
                wanted.stop_reason,
            )
            found = [entry for output in outputs[name] for entry in output.logprobs or ()]
            entries = [entry for output in expected for entry in output.logprobs or ()]
            assert [entry.token_ids for entry in found] == [entry.token_ids for entry in entries]
        stats = built.core.stats()
        assert sum(stats.accepted_per_position) > 60
        assert stats.total_draft_tokens > sum(stats.accepted_per_position)
        assert stats.total_generation_tokens == sum(len(tokens_of(o)) for o in plain.values())
        assert stats.kv_usage == 0


def test_the_settings_are_shown_and_checked(model):
    built = make_engine(model, is_async=True, speculation=NGRAM)
    (shown,) = [decision for decision in built.ready.decisions if decision.what == "speculation"]
    assert shown.value == "ngram, up to 4 drafts"
    with pytest.raises(ConfigError, match="--speculative must be one of ngram"):
        make_engine(model, is_async=True, speculation=SpeculationConfig(speculative="medusa"))
    for number in (0, 65):
        with pytest.raises(ConfigError, match=f"between 1 and 64, got {number}"):
            SpeculationConfig(num_speculative_tokens=number)

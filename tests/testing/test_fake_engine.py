"""Fake engine: sizes, progress, tokens, and options that are rejected."""

import dataclasses

import pytest

from jaxserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_engine import build
from jaxserve.testing.fake_model import FakeModel, expected_tokens


def build_quietly(config):
    return build(config, 0, lambda progress: None)


def test_sizes_have_defaults_and_can_be_set():
    ready = build_quietly(EngineConfig()).ready
    assert (ready.max_model_len, ready.num_blocks, ready.vocab_size) == (1024, 512, 1000)
    ready = build_quietly(
        EngineConfig(
            model=ModelConfig("fake:vocab=300", max_model_len=100),
            cache=CacheConfig(block_size=8, num_blocks=11),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=9),
        )
    ).ready
    assert ready.vocab_size == 300
    assert ready.max_model_len == 80, "no more than the cache holds"
    assert (ready.block_size, ready.num_blocks) == (8, 11)
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (3, 9)


def test_reports_progress():
    received = []
    built = build(EngineConfig(), 2, received.append)
    assert {progress.engine for progress in received} == {2}
    assert received[-1].seconds is not None
    assert built.ready.engine == 2


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_generates_the_expected_tokens(async_scheduling):
    config = EngineConfig(scheduler=SchedulerConfig(async_scheduling=async_scheduling))
    core = build_quietly(config).core
    params = SamplingParams(seed=4, max_tokens=20)
    core.add(Submit("a", [5, 6], params))
    tokens = []
    while core.has_work:
        for output in core.step(0.0):
            tokens += output.token_ids
    assert tokens == expected_tokens([5, 6], params, FakeModel(), context_length=1024)


def test_rejects_wrong_options():
    for config in (
        EngineConfig(model=ModelConfig("fake:speed=3")),
        dataclasses.replace(EngineConfig(), scheduler=SchedulerConfig(policy="lifo")),
    ):
        with pytest.raises(ConfigError):
            build_quietly(config)


def test_an_engine_with_drafts_gives_the_expected_tokens():
    """A vocabulary of one token repeats itself."""
    config = EngineConfig(
        model=ModelConfig(model="fake:vocab=1"),
        speculation=SpeculationConfig(speculative="ngram", num_speculative_tokens=3),
    )
    core = build(config, 0, lambda _: None).core
    core.add(Submit("a", [0] * 5, SamplingParams(temperature=0, max_tokens=40, seed=0)))
    outputs = []
    while core.has_work:
        outputs += core.step(0.0)
    assert [token for output in outputs for token in output.token_ids] == [0] * 40
    assert len(outputs) < 15
    stats = core.stats()
    assert stats.total_draft_tokens == sum(stats.accepted_per_position) > 25

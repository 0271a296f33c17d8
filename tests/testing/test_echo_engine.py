"""Echo engine: completions repeat the prompt at a set pace."""

import itertools
import time
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.echo_engine import build


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_completions_repeat_the_prompt_at_the_set_pace(
    front_checkpoint: Path, async_scheduling
) -> None:
    config = EngineConfig(
        model=ModelConfig(str(front_checkpoint)),
        scheduler=SchedulerConfig(async_scheduling=async_scheduling),
    )
    core = build(config, 0, lambda progress: None, steps_per_s=100).core
    prompts = {"a": [5, 6, 7], "b": [8, 9]}
    completions: dict[str, list[int]] = {name: [] for name in prompts}
    start_s = time.monotonic()
    for name, prompt in prompts.items():
        core.add(Submit(name, prompt, SamplingParams(seed=1, max_tokens=10)))
    while core.has_work:
        for output in core.step(0.0):
            completions[output.request_id] += output.token_ids
    for name, prompt in prompts.items():
        assert completions[name] == list(itertools.islice(itertools.cycle(prompt), 10))
    assert time.monotonic() - start_s >= 9 * 0.01

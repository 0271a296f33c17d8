"""An engine factory without jax for benchmarks of the front: completions repeat the prompt.

``--engine-factory jaxserve.testing.echo_engine:at_40`` gives each request 40 tokens per second.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.checkpoint.locate import open_tokenizer
from jaxserve.config import EngineConfig
from jaxserve.core.plan import Runner, Sizes, StepPlan, StepResult
from jaxserve.engine.core import BuiltEngine
from jaxserve.ipc.messages import Progress
from jaxserve.testing.fake_engine import build_around


def build(
    config: EngineConfig,
    engine: int,
    on_progress: Callable[[Progress], None],
    *,
    steps_per_s: float,
) -> BuiltEngine:
    """Builds engine number ``engine`` with the vocabulary of the model's tokenizer."""

    def make_runner(sizes: Sizes) -> Runner:
        return EchoRunner(steps_per_s)

    vocab_size = open_tokenizer(config.model.model).vocab_size
    return build_around(make_runner, config, engine, on_progress, vocab_size=vocab_size)


at_40 = functools.partial(build, steps_per_s=40)
at_160 = functools.partial(build, steps_per_s=160)
at_1000 = functools.partial(build, steps_per_s=1000)


class EchoRunner:
    """Repeats the tokens of each prompt, with ``steps_per_s`` steps per second."""

    num_compilations = 0

    def __init__(self, steps_per_s: float) -> None:
        self._step_s = 1 / steps_per_s
        self._last_s = 0.0

    def execute(self, plan: StepPlan) -> EchoStep:
        """Starts a step that ends one interval after the previous one, or at once if it is late."""
        self._last_s = max(self._last_s + self._step_s, time.monotonic())
        tokens = [
            [
                s.known_token_ids[
                    (len(s.known_token_ids) + s.num_unknown_tokens) % s.num_prompt_tokens
                ]
            ]
            for s in plan.sampling
        ]
        return EchoStep(StepResult(tokens), self._last_s)


@dataclass(frozen=True, slots=True)
class EchoStep:
    """A step whose result is known, and withheld until ``ready_s``."""

    _result: StepResult
    _ready_s: float

    def sample(self) -> None:
        """Does nothing: an echo ignores constraints."""

    def result(self) -> StepResult:
        """Waits until the step is ready."""
        time.sleep(max(0.0, self._ready_s - time.monotonic()))
        return self._result

"""A factory of engines without jax for measuring what is in front of them: their answers repeat the
prompt, at a pace.

``--engine-factory jaxserve.testing.echo_engine:at_40`` gives each request 40 tokens a second.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.checkpoint.locate import open_tokenizer
from jaxserve.config import EngineConfig
from jaxserve.core.plan import Runner, StepPlan, StepResult
from jaxserve.engine.built import BuiltEngine
from jaxserve.ipc.messages import Progress
from jaxserve.testing.fake_engine import build_around


def build(
    config: EngineConfig,
    engine: int,
    on_progress: Callable[[Progress], None],
    *,
    steps_per_s: float,
) -> BuiltEngine:
    """Builds engine number ``engine``, for the vocabulary of the model's tokenizer."""

    def make_runner(num_blocks: int, block_size: int) -> Runner:
        return EchoRunner(steps_per_s)

    vocab_size = open_tokenizer(config.model.model).vocab_size
    return build_around(make_runner, config, engine, on_progress, vocab_size=vocab_size)


at_40 = functools.partial(build, steps_per_s=40)
at_160 = functools.partial(build, steps_per_s=160)


class EchoRunner:
    """Samples the tokens of the prompt, over and over, ``steps_per_s`` times a second."""

    num_compilations = 0

    def __init__(self, steps_per_s: float) -> None:
        self._step_s = 1 / steps_per_s
        self._last_s = 0.0

    def execute(self, plan: StepPlan) -> EchoStep:
        """Starts a step, which ends one interval after the last one, if that is not over yet."""
        self._last_s = max(self._last_s + self._step_s, time.monotonic())
        tokens = [
            part.known_token_ids[
                (len(part.known_token_ids) + part.num_unknown_tokens) % part.num_prompt_tokens
            ]
            for part in plan.sampling
        ]
        return EchoStep(StepResult(tokens), self._last_s)


@dataclass(frozen=True, slots=True)
class EchoStep:
    """A step whose result is known, and kept until ``ready_s``."""

    _result: StepResult
    _ready_s: float

    def sample(self) -> None:
        """Nothing is left to do: an echo ignores constraints."""

    def result(self) -> StepResult:
        """Waits for the time."""
        time.sleep(max(0.0, self._ready_s - time.monotonic()))
        return self._result

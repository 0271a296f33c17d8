"""An engine factory whose engines fail now and then: the real engine, with steps that raise.

Run it with ``--engine-factory jaxserve.testing.faulty_engine:build``.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.core.plan import StepHandle, StepPlan
from jaxserve.engine.core import BuiltEngine
from jaxserve.ipc.messages import Progress

FAULT_RATE = 1 / 4000
"""The share of steps that raise."""


def build(
    config: EngineConfig, engine: int, on_progress: Callable[[Progress], None]
) -> BuiltEngine:
    """Builds engine number ``engine``."""
    from jaxserve.engine import factory  # not at the top: other parts of this package have no jax

    built = factory.build(config, engine, on_progress)
    runner = built.core._runner
    run = runner.execute

    def execute(plan: StepPlan) -> StepHandle:
        if random.random() < FAULT_RATE:
            raise RuntimeError("a fault of this step")
        return run(plan)

    runner.execute = execute  # type: ignore[method-assign]
    return built

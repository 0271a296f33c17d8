"""An engine factory whose engines fail now and then: the real engine, with steps that raise.

Run it with ``--engine-factory jaxserve.testing.faulty_engine:build``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.core.plan import StepHandle, StepPlan
from jaxserve.engine import factory
from jaxserve.engine.core import BuiltEngine
from jaxserve.ipc.messages import Progress

FAULT_RATE = 1 / 4000
"""The share of steps that raise."""


def build(
    config: EngineConfig, engine: int, on_progress: Callable[[Progress], None]
) -> BuiltEngine:
    """Builds engine number ``engine``."""
    built = factory.build(config, engine, on_progress)
    built.core._runner = _FaultyRunner(built.core._runner)
    return built


class _FaultyRunner:
    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> StepHandle:
        """Runs a step, or raises RuntimeError."""
        if random.random() < FAULT_RATE:
            raise RuntimeError("a fault of this step")
        return self._runner.execute(plan)

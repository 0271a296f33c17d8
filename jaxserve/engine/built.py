"""What a factory of engines returns."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import Ready


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that can serve, and the sizes that it settled on."""

    core: EngineCore
    ready: Ready

"""The first line that an engine process reads: which engine it is and how to build it."""

from __future__ import annotations

import msgspec

from jaxserve.config import EngineConfig

FAILED_EXIT_CODE = 1
"""The engine's exit code when it failed; it has sent `EngineFailed` if it still could."""


class Launch(msgspec.Struct, frozen=True):
    """What an engine process is told: one line of JSON, the first of its standard input."""

    engine: int
    factory: str
    requests_address: str
    events_address: str
    config: EngineConfig

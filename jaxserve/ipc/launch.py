"""The settings of an engine process, which it reads from the first line of its standard input."""

from __future__ import annotations

import logging

import msgspec

from jaxserve.config import EngineConfig

FACTORY = "jaxserve.engine.factory:build"
"""The default engine factory, as ``module:function``."""

FAILED_EXIT_CODE = 1
"""Exit code of an engine that failed. It sent `EngineFailed` before, if it still could."""


class Launch(msgspec.Struct, frozen=True):
    """The settings of an engine process: the first line of its standard input.

    Attributes:
      engine: index of the engine among the replicas.
      factory: builds the engine, as ``module:function``; see `engine.factory.build`.
      requests_address: the socket that the engine binds to receive requests.
      events_address: the socket of the front that receives the events of the engine.
      config: the settings of the engine.
      fingerprint: the `Ready.fingerprint` that the engine must have; "" for any.
      log_level: the level of `logging` from which the engine logs; that of the front.
    """

    engine: int
    factory: str
    requests_address: str
    events_address: str
    config: EngineConfig
    fingerprint: str = ""
    log_level: int = logging.WARNING

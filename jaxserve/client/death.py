"""Why an engine ended although nobody stopped it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    JaxserveError,
    UnsupportedModelError,
)
from jaxserve.ipc.messages import EngineFailed

STARTUP_ERRORS: Mapping[str, type[JaxserveError]] = {
    error.__name__: error for error in (ConfigError, CheckpointError, UnsupportedModelError)
}
"""The errors of a factory that keep their own type in the front."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine.

    Attributes:
      error: the reason.
      running_ids: the requests that the engine was running; None if it could not tell.
    """

    error: JaxserveError
    running_ids: frozenset[str] | None = None


def reported(failed: EngineFailed) -> Death:
    """Returns the death that an engine reported, with the original error if a user can fix it."""
    if failed.is_user_error:
        return Death(STARTUP_ERRORS.get(failed.error_type, JaxserveError)(failed.message))
    error = EngineDeadError(f"engine {failed.engine} failed: {failed.message}")
    return Death(error, frozenset(failed.running_ids))


def exited(name: str, exit_code: int) -> Death:
    """Returns the death of an engine whose process ended without a report."""
    if exit_code >= 0:
        return Death(EngineDeadError(f"{name} ended with exit code {exit_code}"))
    killed_by = _signal_name(-exit_code)
    hint = " (the kernel does this when memory runs out)" if killed_by == "SIGKILL" else ""
    return Death(EngineDeadError(f"{name} was killed by {killed_by}{hint}"))


def _signal_name(number: int) -> str:
    """Returns, for example, ``SIGKILL``. Most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

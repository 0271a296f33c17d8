"""Jitted functions that notice when they are compiled, since that holds everybody up."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("jaxserve")


class CompilationLog:
    """What was compiled, or loaded from the cache of compiled programs, since the start.

    Each program is logged unless that is `expected`.
    """

    def __init__(self) -> None:
        self.programs: list[str] = []
        self._is_expected = False

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Nobody waits meanwhile."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def note(self, program: str, seconds: float) -> None:
        """Adds a program."""
        self.programs.append(program)
        if not self._is_expected:
            logger.warning("compiled during a request (%.1f s): %s", seconds, program)


class Program:
    """A jitted function.

    Args:
      name: what it does, for people.
      jitted: made by jax.jit.
      log: is told of its compilations.
    """

    def __init__(self, name: str, jitted: Any, log: CompilationLog) -> None:
        self._name = name
        self._jitted = jitted
        self._log = log

    def __call__(self, *args: Any, shapes: object, **static: Any) -> Any:
        """Calls it. ``shapes`` says, for people, which of its programs is needed."""
        before, start = self._jitted._cache_size(), time.perf_counter()
        result = self._jitted(*args, **static)
        if self._jitted._cache_size() > before:
            self._log.note(f"{self._name}: {shapes}", time.perf_counter() - start)
        return result

"""The addresses by which a process that reads events and an engine process know each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Where a reader and an engine process meet.

    Attributes:
      engine: index of the engine.
      process: number of the process. Every start of an engine gets a new one.
      reader: number of the reader; see `ipc.messages`.
      requests_address: the socket that the engine binds.
      events_address: the socket that the reader binds.
    """

    engine: int
    process: int
    reader: int
    requests_address: str
    events_address: str

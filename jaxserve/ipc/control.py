"""The messages between the main process and a front process, where a server has several fronts.

The main process starts the engines and restarts them. It tells every front which engine processes
there are; each front then talks to them itself, with `ipc.messages`. `ipc.control_channel` carries
these messages.
"""

from __future__ import annotations

import msgspec

from jaxserve.ipc.messages import Decision, Ready, StepStats
from jaxserve.program.stops import Haste


class EngineUp(msgspec.Struct, tag="engine-up", array_like=True, frozen=True):
    """An engine process can serve. It replaces the process of the same engine that went down.

    Attributes:
      process: the number of the process. Every start of an engine gets a new one.
      requests_address: the socket on which the process receives requests.
      events_address: the socket that the front binds, to receive the events of the process.
      ready: the resolved settings of the engine, and its index.
      stats: the totals of the engine before this process.
    """

    process: int
    requests_address: str
    events_address: str
    ready: Ready
    stats: StepStats


class EngineDown(msgspec.Struct, tag="engine-down", array_like=True, frozen=True):
    """An engine process is dead.

    Attributes:
      process: the number that its `EngineUp` had.
      message: the reason.
      running_ids: the requests of all fronts that it was running, as the engine named them; None if
        it could not.
    """

    process: int
    message: str
    running_ids: list[str] | None


class EnginesGone(msgspec.Struct, tag="engines-gone", array_like=True, frozen=True):
    """No engine is left, and none will be restarted. ``message`` is the reason."""

    message: str


class Phase(msgspec.Struct, tag="phase", array_like=True, frozen=True):
    """The name of the current phase of the start, for the replies of a server that starts."""

    name: str


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """The front refuses new requests, and ends when those in flight have ended."""

    haste: Haste


class AbortRequests(msgspec.Struct, tag="abort-requests", array_like=True, frozen=True):
    """Aborts requests. A front sends it for the other fronts, and the main process passes it on.

    Attributes:
      call: the number of this message among those of its sender; the reply has the same.
      request_id: the ID of the requests, as their client knows it; None: all requests.
    """

    call: int
    request_id: str | None


class Aborted(msgspec.Struct, tag="aborted", array_like=True, frozen=True):
    """The reply to `AbortRequests`: how many completions were aborted."""

    call: int
    count: int


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """The front takes connections. It sends this about every second."""


class FrontUp(msgspec.Struct, tag="front-up", array_like=True, frozen=True):
    """A front can serve requests. The facts about it are the same for all fronts.

    Attributes:
      name: the name of the model.
      max_model_len: the most tokens of one request.
      is_chat: whether the model has a chat template.
      decisions: the settings that were resolved, with reasons.
      fingerprint: the `ModelFiles.fingerprint` of the files that the front has read.
    """

    name: str
    max_model_len: int
    is_chat: bool
    decisions: list[Decision]
    fingerprint: str


class FrontFailed(msgspec.Struct, tag="front-failed", array_like=True, frozen=True):
    """The front cannot start, for a reason that a user can mend.

    Attributes:
      message: the reason.
      error_type: class name of the exception.
    """

    message: str
    error_type: str


ToFront = EngineUp | EngineDown | EnginesGone | Phase | Stop | AbortRequests | Aborted
FromFront = Alive | FrontUp | FrontFailed | AbortRequests | Aborted

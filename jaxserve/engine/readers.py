"""The readers of an engine: whose requests arrive, and who gets which events.

Each thread of the engine process has its part:

    input thread    `Arrivals`        drops the requests of readers that were removed
    main thread     `HandledSubmits`  counts the requests of each reader
    output thread   `EventSenders`    has the sockets, and gives each reader its own outputs

As long as reader 0 is the only one, no ID is looked at, and every event is sent as it is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from jaxserve.ipc.messages import (
    AddReader,
    Arrived,
    BadSubmit,
    EngineEvent,
    EngineRequest,
    Received,
    RemoveReader,
    RequestOutput,
    StepOutputs,
    Submit,
)
from jaxserve.ipc.transport import EventSender
from jaxserve.ipc.wire_ids import split


@dataclass(frozen=True, slots=True)
class NewReader:
    """A reader to send events to. ``num_submits``: requests that have arrived from the others."""

    request: AddReader
    num_submits: int


@dataclass(frozen=True, slots=True)
class SubmitArrived:
    """A request of ``reader`` has arrived."""

    reader: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """``reader`` must learn that its request has arrived. ``is_sent`` is set when it is sent."""

    reader: int
    event: Received
    is_sent: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step whose outputs belong to several readers.

    Attributes:
      step: all outputs, with their IDs on the wire. ``num_submits`` counts those of all readers.
      num_submits: by reader.
    """

    step: StepOutputs
    num_submits: Mapping[int, int]


Outgoing: TypeAlias = EngineEvent | SharedStep | NewReader | RemoveReader | SubmitArrived | Receipt
"""The items that the output thread receives."""


class Arrivals:
    """Receives the requests of all readers first, on the input thread.

    Args:
      put: hands something to the output thread.
    """

    def __init__(self, put: Callable[[Outgoing], None]) -> None:
        self._put = put
        self._is_shared = False
        self._removed: set[int] = set()
        self._num_submits = 0

    def admit(self, request: EngineRequest | BadSubmit) -> bool:
        """Returns whether the engine has to handle a request: its reader was not removed.

        Acknowledges a request that was in a crash before, and waits until that is sent: the request
        may end this process at once.
        """
        match request:
            case Submit() | BadSubmit():
                if self._is_shared:
                    reader, _ = split(request.request_id)
                    if reader in self._removed:
                        return False
                    self._put(SubmitArrived(reader))
                self._num_submits += 1
                if isinstance(request, Submit) and request.num_crashes:
                    self._acknowledge(request.request_id)
            case AddReader(reader=reader):
                assert reader > 0, "reader 0 needs no message"
                if reader in self._removed:
                    return False
                self._is_shared = True
                self._put(NewReader(request, self._num_submits))
            case RemoveReader(reader=reader):
                self._is_shared = True
                self._removed.add(reader)
                self._put(request)
            case _:
                pass
        return True

    def _acknowledge(self, wire: str) -> None:
        reader, request_id = split(wire) if self._is_shared else (0, wire)
        receipt = Receipt(reader, Received(request_id))
        self._put(receipt)
        receipt.is_sent.wait()


class HandledSubmits:
    """Counts the requests that the engine has handled, on the main thread.

    Attributes:
      total: those of all readers.
      by_reader: those of each reader; empty as long as there is only reader 0.
    """

    def __init__(self) -> None:
        self.total = 0
        self.by_reader: Counter[int] = Counter()

    def share(self) -> None:
        """Counts by reader from now on. All requests so far are from reader 0. Idempotent."""
        if not self.by_reader:
            self.by_reader[0] = self.total

    def count(self, request_id: str) -> None:
        """Counts a request; ``request_id`` is its ID on the wire."""
        self.total += 1
        if self.by_reader:
            self.by_reader[split(request_id)[0]] += 1


class EventSenders:
    """Sends the events of an engine to its readers. Belongs to the output thread.

    Args:
      connect: connects to the socket of a reader at an address.
      engine: index of the engine.
      address: the socket of reader 0.
    """

    def __init__(self, connect: Callable[[str], EventSender], engine: int, address: str) -> None:
        self._connect = connect
        self._engine = engine
        self._first = connect(address)
        self._fronts: dict[int, EventSender] = {}  # readers from 1
        self._arrived: Counter[int] = Counter()  # requests by reader; all before the first are of 0

    def send(self, item: Outgoing) -> None:
        """Queues an event for the readers that it concerns, or adds or removes one."""
        match item:
            case StepOutputs():
                self._first.send(item)
            case SharedStep():
                self._send_step(item.step, item.num_submits)
            case SubmitArrived(reader=sender):
                self._arrived[sender] += 1
                self._send_arrived(set(self._fronts) - {sender})
            case NewReader(request=request, num_submits=num_submits):
                self._arrived[0] += num_submits - self._arrived.total()
                self._fronts[request.reader] = self._connect(request.address)
                self._send_arrived({request.reader})
            case Receipt(reader=reader):
                sender = self._fronts.get(reader) if reader else self._first
                if sender is not None:  # else it was removed
                    sender.send(item.event)
                item.is_sent.set()
            case RemoveReader(reader=reader):
                if reader in self._fronts:
                    self._fronts.pop(reader).close(linger_s=0)
            case _:
                self._first.send(item)

    def close(self, *, linger_s: float) -> None:
        """Closes the sockets. Queued events have ``linger_s`` seconds to reach their readers."""
        for sender in (self._first, *self._fronts.values()):
            sender.close(linger_s=linger_s)

    def _send_arrived(self, readers: set[int]) -> None:
        total = self._arrived.total()
        for reader in readers:
            self._fronts[reader].send(Arrived(self._engine, total - self._arrived[reader]))

    def _send_step(self, step: StepOutputs, num_submits: Mapping[int, int]) -> None:
        outputs: dict[int, list[RequestOutput]] = {reader: [] for reader in self._fronts}
        for output in step.outputs:
            reader, request_id = split(output.request_id)
            if reader in outputs:  # else it was removed
                own = msgspec.structs.replace(output, request_id=request_id)
                outputs[reader].append(own)
        for reader, sender in ((0, self._first), *self._fronts.items()):
            num_own = num_submits.get(reader, 0)
            sender.send(
                StepOutputs(
                    step.engine,
                    outputs.get(reader, []),
                    step.stats,
                    num_own,
                    step.num_submits - num_own,
                )
            )

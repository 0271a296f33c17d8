"""The readers of one engine: whose requests it runs, and who gets which events."""

import queue
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import process
from jaxserve.engine.process import EngineLoop
from jaxserve.engine.readers import (
    Arrivals,
    EventSenders,
    HandledSubmits,
    NewReader,
    Receipt,
    SharedStep,
    SubmitArrived,
)
from jaxserve.ipc.messages import (
    Abort,
    AddReader,
    Arrived,
    BadSubmit,
    EngineFailed,
    Progress,
    Received,
    RemoveReader,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
)
from jaxserve.ipc.wire_ids import wire_id
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.waiting import wait_until


def submit(wire, max_tokens=5, **fields):
    return Submit(wire, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=0), **fields)


def admitted(*requests):
    """Returns the requests that the engine has to handle, and what the output thread gets."""
    sent = []
    arrivals = Arrivals(sent.append)
    return [request for request in requests if arrivals.admit(request)], sent


def test_one_reader_needs_no_look_at_ids():
    requests = [submit("1:a"), BadSubmit("7:b", "bad"), Abort(["1:a"]), Shutdown()]
    assert admitted(*requests) == (requests, [])


def test_requests_of_a_removed_reader_are_dropped():
    late = [submit("1:b"), BadSubmit("1:c", "bad"), AddReader(1, "x")]
    before = [AddReader(1, "x"), AddReader(2, "y"), submit("1:a"), RemoveReader(1)]
    after = [submit("2:a"), Abort(["2:a"])]
    handled, sent = admitted(*before, *late, *after)
    assert handled == [*before, *after]
    assert [item.reader for item in sent if isinstance(item, SubmitArrived)] == [1, 2]


def test_a_reader_that_was_removed_before_it_came_stays_away():
    """The main process and the front have connections of their own, so messages may overtake."""
    requests = [RemoveReader(1), AddReader(1, "x"), submit("1:a")]
    assert admitted(*requests) == ([RemoveReader(1)], [RemoveReader(1)])


def test_an_id_without_a_reader_is_of_reader_0():
    _, sent = admitted(AddReader(1, "x"), submit("chatcmpl-1"), submit("user:a"), submit(":a"))
    assert sent[1:] == [SubmitArrived(0)] * 3


@given(st.lists(st.integers(0, 3)))
def test_handled_requests_are_counted_by_reader_once_there_are_several(readers):
    handled = HandledSubmits()
    handled.count("5:before")  # of reader 0, whatever it looks like
    assert not handled.by_reader
    handled.share()
    for i, reader in enumerate(readers):
        handled.count(wire_id(reader, str(i)))
        handled.share()
    assert handled.by_reader == Counter([0, *readers])
    assert handled.total == len(readers) + 1


class Readers:
    """Fake sockets of readers: ``received`` has the events by address."""

    def __init__(self):
        self.received = {}
        self.closed = []
        self.senders = EventSenders(self.connect, 4, "0")

    def connect(self, address):
        return FakeSender(self, address)

    def send(self, *items):
        for item in items:
            self.senders.send(item)


class FakeSender:
    def __init__(self, readers, address):
        self.send = readers.received.setdefault(address, []).append
        self.close = lambda *, linger_s: readers.closed.append((address, linger_s))


def new(reader, num_submits=0):
    return NewReader(AddReader(reader, str(reader)), num_submits)


def test_with_one_reader_events_are_sent_as_they_are():
    events = [
        Progress(4, "load", 1, 2, "GB"),
        StepOutputs(4, [RequestOutput("1:a", [7])], StepStats(num_running=1), 3),
        EngineFailed(4, "m", "t", False),
    ]
    readers = Readers()
    readers.send(*events)
    assert list(map(id, readers.received["0"])) == list(map(id, events))


def test_each_reader_gets_its_own_outputs_and_the_same_state():
    stats = StepStats(num_running=3, total_steps=9)
    outputs = [
        RequestOutput("2:same", [5]),
        RequestOutput("1:same", [6], finish_reason=1),
        RequestOutput("1:a:b", [7]),
        RequestOutput("3:gone", [8]),
    ]
    step = SharedStep(StepOutputs(4, outputs, stats, 9), {0: 0, 1: 3, 2: 4, 3: 2})
    readers = Readers()
    readers.send(new(1), new(2), step)
    base = Arrived(4, 0)  # each new reader learns what has arrived so far
    first = [RequestOutput("same", [6], finish_reason=1), RequestOutput("a:b", [7])]
    assert readers.received == {
        "0": [StepOutputs(4, [], stats, 0, 9)],
        "1": [base, StepOutputs(4, first, stats, 3, 6)],
        "2": [base, StepOutputs(4, [RequestOutput("same", [5])], stats, 4, 5)],
    }


def test_progress_and_failures_go_to_the_owner_alone():
    events = [Progress(4, "load", 1, 2, "GB"), EngineFailed(4, "m", "t", False)]
    readers = Readers()
    readers.send(new(1), *events)
    assert readers.received == {"0": events, "1": [Arrived(4, 0)]}


def test_fronts_learn_of_the_requests_of_the_others():
    readers = Readers()
    readers.send(new(1, 5), new(2, 5))  # reader 0 had sent five before
    readers.send(*map(SubmitArrived, (1, 1, 2)), new(3, 8), SubmitArrived(3))
    counts = {name: [e.num_other_submits for e in got] for name, got in readers.received.items()}
    assert counts == {"0": [], "1": [5, 6, 7], "2": [5, 6, 7, 8], "3": [8]}


def test_a_request_that_was_in_a_crash_is_acknowledged_before_the_engine_handles_it():
    crashed = {"num_crashes": 1}
    readers = Readers()
    arrivals = Arrivals(readers.send)
    assert arrivals.admit(submit("1:a", **crashed))  # of reader 0, whatever it looks like
    assert arrivals.admit(submit("plain"))
    assert readers.received == {"0": [Received("1:a")]}
    assert arrivals.admit(AddReader(1, "1"))
    assert arrivals.admit(submit("1:b:c", **crashed))
    assert readers.received == {"0": [Received("1:a")], "1": [Arrived(4, 2), Received("b:c")]}


def test_a_request_waits_until_its_receipt_is_sent():
    sent = []
    arrivals = Arrivals(sent.append)
    thread = threading.Thread(target=arrivals.admit, args=(submit("a", num_crashes=1),))
    thread.start()
    wait_until(lambda: sent)
    assert sent == [Receipt(0, Received("a"))]
    assert thread.is_alive()
    sent[0].is_sent.set()
    thread.join()


def test_the_receipt_of_a_removed_reader_stops_nothing():
    readers = Readers()
    receipt = Receipt(1, Received("a"))
    readers.send(new(1), RemoveReader(1), receipt)
    assert receipt.is_sent.is_set()
    assert readers.received["1"] == [Arrived(4, 0)]


def test_a_removed_reader_gets_nothing_more():
    step = SharedStep(StepOutputs(4, [RequestOutput("1:a", [5])], StepStats(), 1), {1: 1})
    readers = Readers()
    readers.send(new(1), new(2), RemoveReader(1), RemoveReader(1), step, SubmitArrived(1))
    assert readers.received["1"] == [Arrived(4, 0)]
    assert readers.received["2"] == [
        Arrived(4, 0),
        StepOutputs(4, [], StepStats(), 0, 1),
        Arrived(4, 1),
    ]
    assert readers.closed == [("1", 0)]
    readers.senders.close(linger_s=2)
    assert readers.closed == [("1", 0), ("0", 2), ("2", 2)]


@given(st.lists(st.integers(1, 3) | st.sampled_from(["handle", "step"]), max_size=60))
def test_a_reader_knows_exactly_what_the_engine_has_not_handled(actions):
    """Each reader computes it from its events: see `Replica.load`."""
    readers, inbox, sent = Readers(), [], Counter()
    arrivals, handled = Arrivals(readers.send), HandledSubmits()
    for reader in (1, 2, 3):
        assert arrivals.admit(AddReader(reader, str(reader)))
        handled.share()
    for i, action in enumerate([*actions, "step"]):
        if action == "step":
            step = StepOutputs(4, [], StepStats(), handled.total)
            readers.send(SharedStep(step, handled.by_reader.copy()))
        elif action == "handle":
            if inbox:
                handled.count(inbox.pop(0).request_id)
        else:
            inbox.append(submit(wire_id(action, str(i))))
            assert arrivals.admit(inbox[-1])
            sent[action] += 1
    for reader in (1, 2, 3):
        events = readers.received[str(reader)]
        step = [event for event in events if isinstance(event, StepOutputs)][-1]
        arrived = [event for event in events if isinstance(event, Arrived)][-1]
        own = sent[reader] - step.num_submits
        others = arrived.num_other_submits - step.num_other_submits
        assert own + others == len(inbox)


def run_loop(*messages, replies=(), model="fake"):
    """Runs an engine loop in this thread, and returns its events.

    ``replies``: pairs of a condition on an event and the messages to send when it first holds.
    """
    inbox, events, waiting = queue.SimpleQueue(), [], list(replies)
    for message in messages:
        inbox.put(message)

    def receive(event):
        events.append(event)
        if waiting and waiting[0][0](event):
            for message in waiting.pop(0)[1]:
                inbox.put(message)

    config = EngineConfig(model=ModelConfig(model=model))
    EngineLoop(4, fake_engine.build(config, 4, lambda _: None).core, inbox, receive).run()
    return events


def test_the_loop_reports_to_one_reader_how_many_requests_it_has_handled():
    events = run_loop(
        submit("a"),
        BadSubmit("b", "bad"),
        submit("c"),
        replies=[
            (lambda event: event.stats.total_generation_tokens == 10, [submit("d"), Abort(["d"])]),
            (lambda event: event.num_submits == 4, [Shutdown()]),
        ],
    )
    assert all(isinstance(event, StepOutputs) for event in events)
    assert [event.num_other_submits for event in events] == [0] * len(events)
    assert (events[0].num_submits, events[-1].num_submits) == (3, 4)


def test_the_loop_counts_by_reader_once_there_are_several():
    done = (lambda event: event.step.stats.total_generation_tokens == 15, [Shutdown()])
    events = run_loop(
        submit("before"),
        AddReader(1, ""),
        AddReader(2, ""),
        *map(submit, ("1:a", "2:a")),
        BadSubmit("2:b", "bad"),
        replies=[done],
    )
    assert all(isinstance(event, SharedStep) for event in events)
    assert events[-1].num_submits == {0: 1, 1: 1, 2: 2}
    assert events[-1].step.num_submits == 4


def test_a_new_reader_learns_the_state_at_once(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_S", 3600)
    events = run_loop(
        submit("a"),
        replies=[
            (lambda event: event.stats.total_generation_tokens == 5, [AddReader(1, "")]),
            (lambda event: isinstance(event, SharedStep), [Shutdown()]),
        ],
    )
    assert events[-1].step.outputs == []
    assert events[-1].step.stats.total_generation_tokens == 5


def test_removing_a_reader_aborts_its_requests_and_no_others():
    requests = [AddReader(1, ""), AddReader(11, ""), submit("1:a", 900), submit("11:a", 900)]
    requests += [submit(f"1:w{i}", 900) for i in range(100)]  # more than can run: some wait
    gone = (lambda event: event.step.outputs, [RemoveReader(1)])
    alone = (
        lambda event: (event.step.stats.num_running, event.step.stats.num_waiting) == (1, 0),
        [Shutdown()],
    )
    events = run_loop(*requests, replies=[gone, alone])
    assert {output.request_id for output in events[-1].step.outputs} <= {"11:a"}
    assert events[0].num_submits == {0: 0, 1: 101, 11: 1}

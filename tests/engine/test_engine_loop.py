"""Engine loop: messages, aborts, heartbeats, stats and shutdown."""

import queue

import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import process
from jaxserve.engine.process import EngineLoop
from jaxserve.ipc.messages import Abort, BadSubmit, FinishReason, Shutdown, StepStats, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_model import FakeModel, expected_tokens


def submit(request_id, max_tokens=5):
    return Submit(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=0))


class Front:
    """Runs an engine loop in this thread, records its events, and sends messages in reply.

    ``replies``: pairs of a condition on an event and the messages to send when it first holds.
    """

    def __init__(self, *messages, replies=(), model="fake"):
        self.events = []
        self._inbox = queue.SimpleQueue()
        self._replies = list(replies)
        for message in messages:
            self._inbox.put(message)
        config = EngineConfig(model=ModelConfig(model=model))
        core = fake_engine.build(config, 4, lambda _: None).core
        EngineLoop(4, core, self._inbox, self._receive).run()

    def _receive(self, event):
        self.events.append(event)
        if self._replies and self._replies[0][0](event):
            for message in self._replies.pop(0)[1]:
                self._inbox.put(message)

    def tokens(self, request_id):
        outputs = [o for event in self.events for o in event.outputs if o.request_id == request_id]
        return [token for output in outputs for token in output.token_ids]


def finishes(request_id):
    return lambda event: any(
        o.request_id == request_id and o.finish_reason is not None for o in event.outputs
    )


def is_idle(event):
    return event.stats.num_running + event.stats.num_waiting == 0


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.001)


def test_loop_runs_requests_until_shutdown():
    front = Front(submit("a", 5), submit("b", 9), replies=[(finishes("b"), [Shutdown()])])
    for request_id, max_tokens in (("a", 5), ("b", 9)):
        expected = expected_tokens(
            [1, 2, 3], submit("", max_tokens).params, FakeModel(), context_length=1024
        )
        assert front.tokens(request_id) == expected
    assert {event.engine for event in front.events} == {4}


def test_loop_handles_messages_in_order():
    # Only the second "a" may run: the abort belongs to the first.
    front = Front(
        submit("a", 100),
        Abort(["a", "unknown"]),
        submit("a", 3),
        replies=[(finishes("a"), [Shutdown()])],
    )
    assert len(front.tokens("a")) == 3


def test_loop_aborts_before_the_next_step():
    front = Front(
        submit("a", 900),
        replies=[(lambda e: e.outputs, [Abort(["a"])]), (is_idle, [Shutdown()])],
    )
    # One step was in flight, and a second may have been started before the abort was seen.
    assert len(front.tokens("a")) <= 3
    assert front.events[-1].stats.kv_usage == 0


def test_loop_sends_an_event_when_an_abort_leaves_the_engine_idle(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_S", 3600)
    replies = [(lambda e: e.outputs, [Abort(["a"])]), (is_idle, [Shutdown()])]
    assert Front(submit("a", 900), replies=replies).events[-1].stats.num_running == 0


def test_shutdown_ends_the_loop_while_a_request_is_running():
    front = Front(submit("a", 900), replies=[(lambda e: e.outputs, [Shutdown()])])
    assert 0 < len(front.tokens("a")) < 5


def test_idle_loop_sends_heartbeats():
    beats = []

    def is_third(event):
        beats.append(event)
        return len(beats) == 3

    front = Front(replies=[(is_third, [Shutdown()])])
    assert [(event.outputs, is_idle(event)) for event in front.events] == [([], True)] * 3


def test_stats_include_requests_that_arrived_during_the_step():
    inbox, events = queue.SimpleQueue(), []

    class Core:
        has_work = True
        added = ()

        def add(self, submit):
            self.added = (*self.added, submit.request_id)

        def step(self, now):
            inbox.put(submit(f"a{len(events)}"))
            return []

        def stats(self):
            return StepStats(num_waiting=len(self.added))

    def receive(event):
        events.append(event)
        if len(events) == 3:
            inbox.put(Shutdown())

    EngineLoop(0, Core(), inbox, receive).run()
    assert [event.stats.num_waiting for event in events] == [1, 2, 3]


def test_a_request_that_cannot_be_served_ends_with_an_error():
    too_long = Submit("a", [1] * 5000, SamplingParams(seed=0))
    front = Front(too_long, submit("b"), replies=[(finishes("b"), [Shutdown()])])
    outputs = [o for event in front.events for o in event.outputs if o.request_id == "a"]
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert len(front.tokens("b")) == 5


def test_a_failing_step_ends_the_loop():
    with pytest.raises(RuntimeError, match="asked to fail"):
        Front(submit("a"), model="fake:fail_on_step=2")


def test_a_submit_that_cannot_be_read_fails_only_its_request():
    front = Front(
        BadSubmit("bad", "the engine cannot read the request: n"),
        submit("good"),
        replies=[(finishes("good"), [Shutdown()])],
    )
    outputs = [o for event in front.events for o in event.outputs]
    errors = [(o.request_id, o.error) for o in outputs if o.finish_reason == FinishReason.ERROR]
    assert errors == [("bad", "the engine cannot read the request: n")]
    assert len(front.tokens("good")) == 5

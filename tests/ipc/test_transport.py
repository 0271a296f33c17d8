"""The sockets between the front and the engines."""

import asyncio
import contextlib
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio

from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import (
    Abort,
    AddReader,
    BadSubmit,
    Decision,
    EngineFailed,
    FinishReason,
    Progress,
    Ready,
    RemoveReader,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
    TokenLogprobs,
    encode,
)
from jaxserve.ipc.socket_folder import SocketFolder
from jaxserve.ipc.transport import (
    MAX_EVENTS,
    EventReceiver,
    EventSender,
    RequestReceiver,
    RequestSender,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.waiting import until

TIMEOUT_S = 60  # for waits that only a defect makes this long
REQUESTS = [
    Submit("a", [1, 2, 3], SamplingParams(temperature=0.5, stop=("x", "y"), seed=-(2**63))),
    Submit("b", list(range(5000)), SamplingParams(), 7, -1, 1.5, "salt", num_prior_tokens=3),
    Abort(["a", "b"]),
    Shutdown(),
]
EVENTS = [
    Progress(3, "load weights", 1.5, 2.0, "GB", "from disk", seconds=0.25),
    Ready(3, 2048, 1000, 16, 64, 8, 512, [Decision("dtype", "float32", "a CPU")], 7),
    StepOutputs(
        3,
        [
            RequestOutput("a", [5], logprobs=[TokenLogprobs((5, 6), (-0.1, -2.0), 1)]),
            RequestOutput("b", [8, 9], FinishReason.STOP, stop_reason=9, num_cached_tokens=16),
            RequestOutput("c", [], FinishReason.ERROR, error="lost"),
        ],
        StepStats(num_running=2, kv_usage=0.5),
    ),
    EngineFailed(3, "too large", "Traceback...", True, "ConfigError"),
]


@pytest.fixture
def folder():
    folder = SocketFolder()
    yield folder
    folder.remove()


@contextlib.contextmanager
def terminated(context):
    try:
        yield context
    finally:
        context.term()


def front_context():
    return terminated(zmq.asyncio.Context())


TOO_LONG = "ipc:///" + 200 * "x"


@pytest.mark.parametrize(
    ("make", "address", "words"),
    [
        (EventReceiver, "ipc:///no/such/folder/s", "in /no/such/folder: No such file.*TMPDIR"),
        (RequestReceiver, "ipc:///no/such/folder/s", "in /no/such/folder: No such file.*TMPDIR"),
        (EventSender, TOO_LONG, "File name too long"),
        (RequestSender, TOO_LONG, "File name too long"),
    ],
)
async def test_a_socket_that_cannot_be_opened_is_closed(make, address, words):
    is_front = make in (EventReceiver, RequestSender)
    context = zmq.asyncio.Context() if is_front else zmq.Context()
    with pytest.raises(ConfigError, match=words):
        make(context, address)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    await until(lambda: not ending.is_alive())  # an open socket would stop it for ever


async def test_a_socket_too_many_is_refused():
    with front_context() as context:
        context.max_sockets = 1
        with (
            contextlib.closing(EventReceiver(context, "inproc://first")),
            pytest.raises(ConfigError, match=r"Too many open files.*ulimit"),
        ):
            EventReceiver(context, "inproc://second")


async def test_every_message_passes_between_front_and_engine(folder):
    received = []

    def engine():
        with terminated(zmq.Context()) as context:
            receiver = RequestReceiver(context, folder.requests(3))
            sender = EventSender(context, folder.events(0))
            sender.send(EVENTS[0])  # so that the front knows that the engine listens
            while not isinstance(received[-1] if received else None, Shutdown):
                received.append(receiver.receive())
            for event in EVENTS[1:]:
                sender.send(event)
            receiver.close()
            sender.close(linger_s=5)

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    with front_context() as context:
        receiver = EventReceiver(context, folder.events(0))
        async with asyncio.timeout(TIMEOUT_S):
            events = await receiver.receive()
            sender = RequestSender(context, folder.requests(3))
            for request in REQUESTS:
                sender.send(request)
            while len(events) < len(EVENTS):
                events += await receiver.receive()
        receiver.close()
        sender.close()
    await asyncio.to_thread(thread.join, TIMEOUT_S)
    assert received == REQUESTS
    assert events == EVENTS


async def test_requests_of_other_readers_have_their_number_on_the_wire(folder):
    requests = [AddReader(3, "ipc://x"), *REQUESTS[:3], RemoveReader(3)]
    with terminated(zmq.Context()) as engine_context, front_context() as context:
        receiver = RequestReceiver(engine_context, folder.requests(0))
        sender = RequestSender(context, folder.requests(0), reader=3)
        for request in requests:
            sender.send(request)
        sender.close(linger_s=TIMEOUT_S)  # what was sent arrives all the same
        received = [receiver.receive() for _ in requests]
        receiver.close()
    a, b = (msgspec.structs.replace(r, request_id=f"3:{r.request_id}") for r in REQUESTS[:2])
    assert received == [requests[0], a, b, Abort(["3:a", "3:b"]), requests[-1]]
    assert [request.request_id for request in REQUESTS[:2]] == ["a", "b"]


async def test_the_front_receives_pending_events_together():
    num_events = 2 * MAX_EVENTS + 1
    events = [Progress(i, "load", i, num_events, "things") for i in range(num_events)]
    address = "inproc://events"  # messages arrive as soon as they are sent
    with (
        front_context() as context,
        contextlib.closing(EventReceiver(context, address)) as receiver,
        contextlib.closing(zmq.Socket(context, zmq.PUSH)) as raw,
    ):
        raw.connect(address)
        for event in events:
            raw.send(encode(event))
        received = [await receiver.receive() for _ in range(3)]
        assert list(map(len, received)) == [MAX_EVENTS, MAX_EVENTS, 1]
        assert sum(received, []) == events
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        raw.send(encode(events[0]))
        assert await waiting == events[:1]


DEEP = b"\x91" * 100_000 + b"\xc0"
GARBAGE = [b"", b"\xc1", b"\x91\xa7unknown", b"\x92\xa5abort\x01", b"\x80" * 50, DEEP]
GARBAGE += [b"\x93\xa6submit\xa1a" + DEEP, b"\x92\xa6submit\x01"]


async def test_the_front_drops_messages_that_it_cannot_decode(folder, caplog):
    with front_context() as context:
        receiver = EventReceiver(context, folder.events(0))
        with zmq.Socket(context, zmq.PUSH) as raw:
            raw.connect(folder.events(0))
            for data in [*GARBAGE, encode(EVENTS[1])]:
                raw.send(data)
            events = []
            async with asyncio.timeout(TIMEOUT_S):
                while not events:
                    events = await receiver.receive()
            assert events == [EVENTS[1]]
        receiver.close()
    assert sum("cannot be decoded" in r.message for r in caplog.records) == len(GARBAGE)


def test_the_engine_drops_messages_that_it_cannot_decode(folder, caplog):
    with terminated(zmq.Context()) as context:
        receiver = RequestReceiver(context, folder.requests(0))
        with context.socket(zmq.PUSH) as raw:
            raw.connect(folder.requests(0))
            for data in [*GARBAGE, encode(Shutdown())]:
                raw.send(data)
            assert receiver.receive() == Shutdown()
        receiver.close()
    assert sum("cannot be decoded" in r.message for r in caplog.records) == len(GARBAGE)


def bad_submits():
    """Yields the bytes of submits that are not valid, and words of the reason."""
    good = msgspec.msgpack.decode(encode(Submit("good", [1], SamplingParams(seed=1))))
    params = good[3]
    for change, words in [
        ({"n": 0}, "n must be between 1 and 128, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be at most max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"grammar": {"kind": "yaml"}}, "yaml"),
    ]:
        submit = [*good[:3], {**params, **change}, *good[4:]]
        yield msgspec.msgpack.encode(submit), words
    yield msgspec.msgpack.encode(good[:2]), "length"
    yield msgspec.msgpack.encode([*good[:2], ["x"], *good[3:]]), "int"


def test_an_invalid_submit_is_reported_and_does_not_end_the_receiver(folder, caplog):
    sent = list(bad_submits())
    with terminated(zmq.Context()) as context:
        receiver = RequestReceiver(context, folder.requests(0))
        with context.socket(zmq.PUSH) as raw:
            raw.connect(folder.requests(0))
            for data, _ in sent:
                raw.send(data)
            received = [receiver.receive() for _ in sent]
        receiver.close()
    for bad, (_, words) in zip(received, sent, strict=True):
        assert isinstance(bad, BadSubmit)
        assert bad.request_id == "good"
        assert bad.reason.startswith("the engine cannot read the request: ")
        assert words in bad.reason


def test_terminating_the_context_ends_receive(folder):
    context = zmq.Context()
    receiver = RequestReceiver(context, folder.requests(0))
    received = []
    thread = threading.Thread(target=lambda: received.append(receiver.receive()), daemon=True)
    thread.start()
    context.term()
    thread.join(TIMEOUT_S)
    assert received == [None]


async def test_sending_to_a_dead_engine_and_closing_do_not_block(folder):
    with terminated(zmq.Context()) as engine_context, front_context() as context:
        receiver = RequestReceiver(engine_context, folder.requests(0))
        sender = RequestSender(context, folder.requests(0))
        sender.send(Shutdown())
        assert receiver.receive() == Shutdown()
        receiver.close()
        for _ in range(5000):
            sender.send(Abort(["a"]))
        sender.close()
        sender.close()

"""What a front makes of the messages of engines and of the main process, which this test sends."""

import asyncio

import msgspec
import pytest
import zmq

from jaxserve.client.attached import AttachedEngines
from jaxserve.client.engine_client import EngineClient
from jaxserve.client.in_flight import InFlight
from jaxserve.client.output_stream import OutputStream
from jaxserve.config import EngineConfig, ParallelConfig
from jaxserve.errors import EngineDeadError, RequestFailedError
from jaxserve.ipc.control import EngineDown, EnginesGone, EngineUp
from jaxserve.ipc.messages import (
    AddReader,
    Arrived,
    Received,
    RemoveReader,
    RequestOutput,
    StepOutputs,
    StepStats,
    Submit,
)
from jaxserve.ipc.socket_folder import SocketFolder
from jaxserve.ipc.transport import EventSender, RequestReceiver
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.engine_calls import ENDLESS, generate, is_healthy
from jaxserve.testing.scripted_engine import READY
from jaxserve.testing.waiting import until

READER = 3
TIMEOUT_S = 30  # for waits that only a defect makes this long


class Engine:
    """The sockets of an engine process, whose messages the test makes."""

    def __init__(self, context, folder, process, engine=0):
        self.up = EngineUp(
            process,
            folder.requests(process),
            folder.events(process, READER),
            msgspec.structs.replace(READY, engine=engine),
            StepStats(),
        )
        self.engine = engine
        self._receiver = RequestReceiver(context, self.up.requests_address)
        self._sender = EventSender(context, self.up.events_address)

    async def receive(self):
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.to_thread(self._receiver.receive)

    def step(self, stats, *counts, outputs=()):
        self._sender.send(StepOutputs(self.engine, list(outputs), stats, *counts))

    def arrived(self, num_submits):
        self._sender.send(Arrived(self.engine, num_submits))

    def received(self, request_id):
        self._sender.send(Received(request_id))

    def close(self):
        self._receiver.close()
        self._sender.close(linger_s=0)


@pytest.fixture
async def make_engine():
    """Makes engines, each with the next process number."""
    folder, context, made = SocketFolder(), zmq.Context(), []

    def make_engine(engine=0):
        made.append(Engine(context, folder, len(made), engine))
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()
    context.term()
    folder.remove()


@pytest.fixture
async def attach():
    """Makes clients of attached engines, and closes them after the test."""
    clients = []

    def attach(num_engines=1):
        config = EngineConfig(parallel=ParallelConfig(data_parallel_size=num_engines))
        engines = AttachedEngines(config, reader=READER)
        clients.append(EngineClient(engines, config))
        return engines, clients[-1]

    yield attach
    for client in clients:
        await client.close()


def request(request_id):
    return InFlight(Submit(request_id, [1], SamplingParams(seed=1)), OutputStream())


async def test_a_report_that_was_on_its_way_forgets_no_request(attach, make_engine):
    engines, _ = attach()
    engine = make_engine()
    engines.handle(engine.up)
    replica = engines.replicas[0]
    for request_id in "ab":
        replica.submit(request(request_id))
    engine.step(StepStats(num_running=5), 0)
    await until(lambda: replica.stats.num_running == 5)
    assert replica.load.num_sent == 2
    engine.step(StepStats(num_running=6), 1)
    await until(lambda: replica.stats.num_running == 6)
    assert replica.load.num_sent == 1
    engine.step(StepStats(num_running=7), 2)
    await until(lambda: replica.stats.num_running == 7)
    assert replica.load.num_sent == 0


async def test_requests_of_other_fronts_count_from_their_arrival(attach, make_engine):
    engines, _ = attach()
    engine = make_engine()
    engines.handle(engine.up)
    replica = engines.replicas[0]
    engine.step(StepStats(num_running=1), 0, 4)  # before the front knew what has arrived
    await until(lambda: replica.stats.num_running == 1)
    assert replica.load.num_sent == 0
    engine.arrived(6)
    await until(lambda: replica.load.num_sent == 2)
    engine.step(StepStats(num_running=3), 0, 6)
    await until(lambda: replica.load.num_sent == 0)


async def test_the_number_of_the_reader_comes_before_its_requests(attach, make_engine):
    engines, client = attach()
    engine = make_engine()
    engines.handle(engine.up)
    await engines.all_ready()
    async with generate(client, request_id="a:b") as outputs:
        first = asyncio.create_task(anext(outputs))
        assert await engine.receive() == AddReader(READER, engine.up.events_address)
        submit = await engine.receive()
        assert submit.request_id == "3:a:b"
        engine.step(StepStats(), 1, outputs=[RequestOutput("a:b", [7])])
        assert (await first).request_id == "a:b"
    assert (await engine.receive()).request_ids == ["3:a:b"]
    await client.close()
    assert await engine.receive() == RemoveReader(READER)


async def test_totals_never_go_back_when_an_engine_is_replaced(attach, make_engine):
    """A front may have read a later state of the dead process than the main process has."""
    engines, client = attach()
    first, second = make_engine(), make_engine()
    engines.handle(msgspec.structs.replace(first.up, stats=StepStats(total_steps=100)))
    first.step(StepStats(num_running=2, total_steps=10, prefix_hits=3))
    await until(lambda: client.stats[0].total_steps == 110)
    engines.handle(EngineDown(0, "dead", None))
    assert client.stats[0] == StepStats(total_steps=110, prefix_hits=3)
    before = StepStats(total_steps=109, total_restarts=1)
    engines.handle(msgspec.structs.replace(second.up, stats=before))
    assert client.stats[0] == StepStats(total_steps=110, prefix_hits=3, total_restarts=1)
    second.step(StepStats(total_steps=1))
    await until(lambda: client.stats[0].total_steps == 111)


async def test_named_requests_of_other_fronts_are_no_suspects(attach, make_engine):
    engines, client = attach()
    engine = make_engine()
    engines.handle(engine.up)
    replica = engines.replicas[0]
    streams = [client.generate(Submit(i, [1], ENDLESS)) for i in "abc"]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await until(lambda: len(replica.requests) == 3)
    running = {request.id: request for request in replica.requests.values()}
    engines.handle(EngineDown(0, "dead", ["3:b", "2:a", "c", "31:a"]))
    assert {i: request.num_crashes for i, request in running.items()} == {"a": 0, "b": 1, "c": 0}
    assert client.num_in_flight == 3
    await client.close()
    for reader in readers:
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader


async def test_a_request_that_never_arrived_is_no_suspect_of_its_second_crash(attach, make_engine):
    engines, client = attach()
    engine = make_engine()
    engines.handle(engine.up)
    replica = engines.replicas[0]
    requests = {i: request(i) for i in ("first", "lost", "named", "received")}
    for i, one in requests.items():
        one.num_crashes = int(i != "first")
        replica.submit(one)
    assert isinstance(await engine.receive(), AddReader)
    submits = [await engine.receive() for _ in requests]
    assert [submit.num_crashes for submit in submits] == [0, 1, 1, 1]
    engine.received("received")
    await until(lambda: requests["received"].is_received)
    engines.handle(EngineDown(0, "dead", None))
    assert replica.suspects(in_order=True) == set()  # they have been moved
    crashes = {i: one.num_crashes for i, one in requests.items()}
    assert crashes == {"first": 1, "lost": 1, "named": 1, "received": 2}
    with pytest.raises(RequestFailedError, match="failed 2 times"):
        await anext(aiter(requests["received"].stream))
    # What an engine has said to another one does not count for the next one.
    second = make_engine()
    engines.handle(second.up)
    assert not any(one.is_received for i, one in requests.items() if i != "received")
    engines.handle(EngineDown(1, "dead", [f"{READER}:named"]))
    assert [one.num_crashes for one in requests.values()] == [1, 1, 2, 2]


async def test_a_front_ends_if_it_cannot_listen_to_an_engine(attach, make_engine):
    engines, client = attach()
    up = msgspec.structs.replace(make_engine().up, events_address="ipc:///no/such/folder/s")
    engines.handle(up)
    assert "/no/such/folder" in str(engines.gone.result())
    engines.handle(EngineDown(up.process, "dead", None))
    async with asyncio.timeout(TIMEOUT_S):
        await client.close()


async def test_all_are_ready_once_each_engine_was_up(attach, make_engine):
    engines, client = attach(num_engines=2)
    with pytest.raises(EngineDeadError, match="not every engine has started"):
        client.check_health()
    waiting = asyncio.create_task(engines.all_ready())
    second, first = make_engine(1), make_engine(0)
    engines.handle(second.up)
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not is_healthy(client)
    engines.handle(EngineDown(0, "dead", []))
    engines.handle(first.up)
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    assert list(client.engines) == list(client.stats) == [0, 1]
    assert client.ready.engine == 0
    with pytest.raises(EngineDeadError, match="dead"):
        client.check_health()
    engines.handle(make_engine(1).up)
    client.check_health()


async def test_nobody_waits_for_engines_that_are_gone(attach):
    engines, client = attach()
    waiting = asyncio.create_task(engines.all_ready())
    await asyncio.sleep(0)
    engines.handle(EnginesGone("the last restart failed"))
    with pytest.raises(EngineDeadError, match="the last restart failed"):
        await waiting
    with pytest.raises(EngineDeadError, match="the last restart failed"):
        client.check_health()
    with pytest.raises(EngineDeadError, match="the last restart failed"):
        async with generate(client) as outputs:
            await anext(outputs)


async def test_two_processes_of_one_engine_at_a_time_are_a_defect(attach, make_engine):
    engines, _ = attach()
    engines.handle(make_engine().up)
    with pytest.raises(AssertionError, match="engine 0 is up twice"):
        engines.handle(make_engine().up)

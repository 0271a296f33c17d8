"""A front process as the main process sees it: a front that hangs is killed."""

import asyncio
import socket

import psutil
import pytest
import zmq.asyncio

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import JaxserveError
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.ipc.control import Phase
from jaxserve.ipc.control_channel import ControlAddresses
from jaxserve.ipc.socket_folder import SocketFolder
from jaxserve.testing.waiting import until
from server import front_process
from server.front_process import FrontProcess, FrontSilence
from server.fronts import Fronts
from server.launch import FrontLaunch
from server.settings import ApiSettings, FrontSettings, ServerSettings


@pytest.fixture
def launch(front_checkpoint):
    config = EngineConfig(model=ModelConfig(model=str(front_checkpoint)))
    server = ServerSettings(api_server_count=2)
    counts, folder = SharedCounts.create(num_fronts=2, num_engines=1), SocketFolder()
    launch = FrontLaunch(
        index=0,
        reader=1,
        control=ControlAddresses.of(folder, 1),
        counts_fd=counts.fileno(),
        settings=FrontSettings(config, ApiSettings(), server, None, is_local=True, created=0),
    )
    yield launch
    folder.remove()
    counts.close()


@pytest.fixture
async def front(launch):
    """A front that is never told of an engine, so it takes connections but serves nothing."""
    with zmq.asyncio.Context() as context:
        front = FrontProcess(launch, context, FrontSilence(), on_abort=lambda *_: None)
        try:
            front.send(Phase("compile"))
            await until(lambda: front.takes_connections or front.ended.done())
            yield front
        finally:
            await front.remove()


async def health(front) -> bytes:
    """Sends a request for /health over a new connection, and returns the reply."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    assert front.connections.send(connection)
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    reply = await reader.read()
    writer.close()
    return reply


async def test_a_front_that_starts_answers_503_with_the_phase(front) -> None:
    # The name of the phase may still be in the socket.
    while b"compile" not in (reply := await health(front)):
        assert reply.startswith(b"HTTP/1.1 503")
    assert reply.startswith(b"HTTP/1.1 503")
    assert not front.serves


async def test_a_front_that_hangs_gets_no_connections_and_ends(front) -> None:
    psutil.Process(front.process.pid).suspend()
    front._silence = FrontSilence(suspect_s=0.0, dead_s=0.0)
    assert not front.takes_connections
    error = await front.ended
    assert "hangs" in str(error)
    assert await front.remove() == []
    assert not front.process.is_running


async def test_a_front_that_hangs_before_its_first_message_ends(launch) -> None:
    with zmq.asyncio.Context() as context:
        silence = FrontSilence(start_s=0.0)
        front = FrontProcess(launch, context, silence, on_abort=lambda *_: None)
        psutil.Process(front.process.pid).suspend()
        assert "hangs" in str(await front.ended)
        await front.remove()
        assert not front.process.is_running


async def test_a_front_that_ends_says_how(front) -> None:
    psutil.Process(front.process.pid).kill()
    assert "was killed by SIGKILL" in str(await front.ended)
    assert front.up.done()
    assert not front.serves


def make_fronts(count, launch, *, on_end=lambda _: None):
    return Fronts(
        count,
        [],
        launch=lambda index, reader: launch,
        on_begin=lambda _: [],
        on_end=on_end,
        max_restarts=5,
    )


async def test_a_process_that_the_system_refuses_fails_the_start(launch, monkeypatch) -> None:
    def refuse(*_args, **_options):
        raise OSError("no room")

    monkeypatch.setattr(front_process, "ChildProcess", refuse)
    fronts = make_fronts(2, launch)
    with pytest.raises(JaxserveError, match="process of front 0 cannot be started: no room"):
        await fronts.start()
    await fronts.close()


class FakeFront:
    def __init__(self):
        self.up = asyncio.get_running_loop().create_future()

    async def remove(self):
        return []


async def test_a_start_of_many_fronts_can_be_cancelled(monkeypatch) -> None:
    """Other tasks run between the starts, so a signal acts before the last one."""
    made, ended = [], []

    def new_front(*_):
        made.append(FakeFront())
        return made[-1]

    monkeypatch.setattr(Fronts, "_new_front", new_front)
    fronts = make_fronts(64, None, on_end=ended.append)
    starting = asyncio.create_task(fronts.start())
    while not made:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert 0 < len(made) < 64
    await fronts.close()
    assert ended == made

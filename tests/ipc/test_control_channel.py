"""The sockets between the main process and a front."""

import asyncio

import msgspec
import pytest
import zmq.asyncio

from jaxserve.errors import ConfigError
from jaxserve.ipc.control import AbortRequests, Alive, Phase, Stop
from jaxserve.ipc.control_channel import ControlAddresses, ControlChannel
from jaxserve.ipc.socket_folder import SocketFolder
from jaxserve.program.stops import Haste


@pytest.fixture
def addresses():
    folder = SocketFolder()
    yield ControlAddresses.of(folder, 7)
    folder.remove()


@pytest.fixture
def context():
    with zmq.asyncio.Context() as context:
        yield context


async def test_messages_wait_for_a_process_that_starts_later(addresses, context) -> None:
    main = ControlChannel.of_main(context, addresses)
    sent = [Phase("compile"), Stop(Haste.LIMITED), AbortRequests(3, None)]
    for message in sent:
        main.send(message)
    front = ControlChannel.of_front(context, addresses)
    front.send(Alive())
    assert [await front.receive() for _ in sent] == sent
    assert await main.receive() == Alive()
    front.close()
    main.close()


async def test_nothing_waits_for_a_process_that_has_ended(addresses, context) -> None:
    main = ControlChannel.of_main(context, addresses)
    for _ in range(10_000):
        main.send(Phase("x" * 1000))
    main.close()
    addresses.remove()
    addresses.remove()


async def test_a_message_of_the_other_direction_is_refused(addresses, context) -> None:
    main, front = (
        ControlChannel.of_main(context, addresses),
        ControlChannel.of_front(context, addresses),
    )
    front.send(Phase("a front does not say this"))
    with pytest.raises(msgspec.ValidationError):
        await asyncio.wait_for(main.receive(), 60)
    front.close()
    main.close()


async def test_a_channel_without_a_folder_is_an_error_and_leaves_no_socket(tmp_path) -> None:
    gone = ControlAddresses(f"ipc://{tmp_path}/gone/a", f"ipc://{tmp_path}/gone/b")
    context = zmq.asyncio.Context()
    with pytest.raises(ConfigError, match="cannot have a socket in .*gone"):
        ControlChannel.of_main(context, gone)
    context.term()  # waits for ever if a socket is left

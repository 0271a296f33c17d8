"""Connections that one process hands to another, and who gets them."""

import asyncio
import contextlib
import os
import socket

import pytest

from jaxserve.testing.waiting import until
from server.acceptor import Acceptor
from server.connections import ConnectionReceiver, ConnectionSender


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def clients(listener, count):
    """Connects ``count`` clients, each of which sends its number."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            client = socket.create_connection(listener.getsockname())
            client.settimeout(60)
            client.sendall(b"%d" % number)
            found.append(stack.enter_context(client))
        yield found


class Taker:
    """A front that lives in this process: both ends, and the connections that it has."""

    def __init__(self):
        self.sender = ConnectionSender()
        descriptor = os.dup(self.sender.child_end.fileno())
        self.receiver = ConnectionReceiver(descriptor)
        self.sender.child_end.close()
        self.numbers = []
        self.connections = []

    async def take(self):
        connection = await self.receiver.receive()
        self.connections.append(connection)
        self.numbers.append(int(await asyncio.get_running_loop().sock_recv(connection, 100)))
        self.receiver.taken()

    async def take_all(self):
        while True:
            await self.take()

    def end(self):
        """Ends like a process that is killed."""
        self.receiver.close()
        for connection in self.connections:
            connection.close()


class Takers:
    """Implements `acceptor.Takers` for one front at a time."""

    def __init__(self, taker=None):
        self.taker = taker

    @property
    def can_take(self):
        return self.taker is not None

    def hand(self, connection):
        return self.taker is not None and self.taker.sender.send(connection)


@contextlib.contextmanager
def accepting(listener, takers):
    acceptor = Acceptor([listener], takers)
    try:
        yield acceptor
    finally:
        acceptor.close()


async def test_connections_arrive_in_order_and_the_sender_closes_its_copies(listener):
    taker = Taker()
    with accepting(listener, Takers(taker)), clients(listener, 5) as connected:
        await until(lambda: taker.sender.num_untaken == 5)
        for _ in range(5):
            await taker.take()
        assert sorted(taker.numbers) == [0, 1, 2, 3, 4]
        await until(lambda: taker.sender.num_untaken == 0)
        # Nobody else holds the connections: they end as soon as the front closes them.
        taker.end()
        assert [client.recv(1) for client in connected] == [b""] * 5
        assert taker.sender.close() == []


async def test_connections_that_a_dead_front_has_not_taken_go_to_another(listener):
    dead, alive = Taker(), Taker()
    takers = Takers(dead)
    with accepting(listener, takers) as acceptor, clients(listener, 3) as connected:
        await until(lambda: dead.sender.num_untaken == 3)
        await dead.take()
        await until(lambda: dead.sender.num_untaken == 2)
        dead.end()
        takers.taker = None
        acceptor.hand_over(dead.sender.close())
        takers.taker = alive
        await alive.take()
        await alive.take()
        assert sorted(dead.numbers + alive.numbers) == [0, 1, 2]
        assert connected[dead.numbers[0]].recv(1) == b""
        alive.end()
        alive.sender.close()


async def test_connections_wait_until_a_front_can_take_them(listener):
    takers, taker = Takers(), Taker()
    with accepting(listener, takers), clients(listener, 2):
        for _ in range(3):
            await asyncio.sleep(0)
        takers.taker = taker
        await taker.take()
        await taker.take()
        assert sorted(taker.numbers) == [0, 1]
        taker.end()
        taker.sender.close()


async def test_a_front_that_has_ended_takes_nothing_and_closing_twice_is_harmless():
    taker = Taker()
    taker.end()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not taker.sender.send(ours)
        assert taker.sender.close() == []
        assert taker.sender.close() == []


async def test_the_receiver_sees_the_end_of_the_main_process():
    taker = Taker()
    taker.sender.close()
    with pytest.raises(EOFError):
        await taker.receiver.receive()
    taker.end()


async def test_a_front_without_descriptors_drops_a_connection_like_an_event_loop(
    listener, monkeypatch
):
    taker = Taker()
    received = socket.recv_fds

    def without_descriptor(sock, size, count):
        data, descriptors, flags, address = received(sock, size, count)
        for descriptor in descriptors:
            os.close(descriptor)
        return data, [], flags, address

    monkeypatch.setattr(socket, "recv_fds", without_descriptor)
    task = asyncio.create_task(taker.receiver.receive())
    with accepting(listener, Takers(taker)), clients(listener, 1) as (client,):
        client.setblocking(False)
        with pytest.raises(ConnectionResetError):  # what it had sent was not read
            await asyncio.get_running_loop().sock_recv(client, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    taker.end()
    taker.sender.close()

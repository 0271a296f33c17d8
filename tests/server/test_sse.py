"""A client that disconnects ends its requests at once."""

import asyncio
import json
from typing import Any

import pytest

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until
from server.app import create_app
from server.state import ServerState

Message = dict[str, Any]


class Client:
    """A connection as an ASGI application sees it, with one request."""

    def __init__(self, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent: list[Message] = []
        self.got_body = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        data = json.dumps(body).encode()
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }

    async def receive(self) -> Message:
        return await self._incoming.get()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


ENDLESS = {"prompt": "hello", "ignore_eos": True, "max_tokens": 200}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stall_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_request(n, stall_after, stream) -> None:
    text_engine = scripted_text_engine("hello world")
    engine = text_engine.engine
    engine.stall_after = stall_after
    app = create_app(ServerState(text_engine))
    client = Client(ENDLESS | {"n": n, "stream": stream})
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await until(lambda: len(engine.submitted) == n)
    if stream and stall_after:
        await until(client.got_body.is_set)
    client.disconnect()
    await asyncio.wait_for(serving, 10)
    assert len(engine.aborted) == n
    assert text_engine.num_in_flight == 0
    assert text_engine.metrics.finished == {"abort": n}
    assert not any(b"[DONE]" in m.get("body", b"") for m in client.sent)


async def test_a_disconnect_during_a_write_aborts_the_request() -> None:
    text_engine = scripted_text_engine("hello world")
    client = Client(ENDLESS | {"stream": True})
    blocked = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()

    app = create_app(ServerState(text_engine))
    serving = asyncio.create_task(app(client.scope, client.receive, send))
    await until(blocked.is_set)
    client.disconnect()
    await asyncio.wait_for(serving, 10)
    assert len(text_engine.engine.aborted) == 1


async def test_cancelling_the_application_aborts_the_request() -> None:
    text_engine = scripted_text_engine("hello world")
    text_engine.engine.stall_after = 1
    client = Client(ENDLESS | {"stream": True})
    app = create_app(ServerState(text_engine))
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await until(client.got_body.is_set)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert len(text_engine.engine.aborted) == 1
    assert text_engine.num_in_flight == 0

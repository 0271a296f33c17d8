"""A client that disconnects ends its requests at once; events are single lines."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from jaxserve.errors import RequestFailedError
from jaxserve.front.memory import FreedMemory
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until
from server.app import create_app
from server.sse import FRAMINGS, EventStream
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
    await asyncio.wait_for(serving, 60)
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
    await asyncio.wait_for(serving, 60)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/v1/responses", "input")]
)
async def test_a_request_that_the_engine_fails_is_one_line_in_the_log(
    path, field, stream, caplog
) -> None:
    text_engine = scripted_text_engine("hello world")
    engine = text_engine.engine
    engine.fail_after = 1
    engine.failure = RequestFailedError("the engine crashed twice on this request")
    client = Client({field: "hello", "stream": stream}, path)
    app = create_app(ServerState(text_engine))
    await asyncio.wait_for(app(client.scope, client.receive, client.send), 60)
    assert b"crashed twice" in b"".join(m.get("body", b"") for m in client.sent)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.message.endswith("failed: the engine crashed twice on this request")
    assert record.exc_info is None


class Piece(msgspec.Struct):
    """A chunk with any text."""

    text: str


@pytest.mark.parametrize("framing", ["plain", "named"])
@pytest.mark.parametrize("repeats", [1, 100_000])
async def test_no_event_has_a_line_break_in_its_text(framing: str, repeats: int) -> None:
    """JS-015, for small and large events."""
    text = "A\u2028B\x85C\u2029D\x0bE\x1cF\r\nG“\xa0é" * repeats
    sent: list[Message] = []

    async def chunks() -> AsyncGenerator[Piece, None]:
        yield Piece(text)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    rest = chunks()
    stream = EventStream(await anext(rest), rest, FreedMemory(), FRAMINGS[framing])
    await stream({"type": "http"}, receive, send)
    body = b"".join(message.get("body", b"") for message in sent).decode()
    lines = [line for line in body.splitlines() if line.startswith("data: {")]
    assert body.splitlines() == body.split("\n")[:-1]
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == [{"text": text}]

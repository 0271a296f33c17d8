"""Clients that disconnect at any moment leave nothing behind; the others get their replies."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from jaxserve.front.text_engine import TextEngine
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until
from server.app import create_app
from server.settings import ApiSettings
from server.state import ServerState

LONG = "hello world " * 300  # threads encode it
MESSAGES = [{"role": "user", "content": LONG}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "max_tokens": 50}),
    ("/v1/completions", {"prompt": [LONG] * 4, "n": 3, "stream": True}),
    ("/v1/completions", {"prompt": "a", "n": 8, "logprobs": 5}),
    ("/v1/completions", {"prompt": "a", "n": 8, "logprobs": 5, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES * 9, "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "("}}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": LONG, "stream": True}),
    ("/v1/embeddings", {"input": [LONG] * 5}),
    ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    ("/detokenize", {"tokens": list(range(100, 200))}),
]
STAYS = 10**9


async def send_and_leave(app: ASGIApp, path: str, body: dict[str, Any], turns: int) -> int:
    """Sends a request and disconnects after so many turns of the loop. Returns the status."""
    received, statuses = [], []

    async def receive() -> Message:
        if not received:
            received.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}
        if turns == STAYS:
            await asyncio.Event().wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app({**scope, "query_string": b"", "state": {}}, receive, send)
    (status,) = statuses
    return status


def is_idle(text_engine: TextEngine) -> bool:
    grammars = text_engine.grammars
    pools = [text_engine.text_pool, text_engine._encode_pool, text_engine._render_pool]
    pools += [text_engine._build_pool, grammars._quick, grammars._long]
    return (
        text_engine.admission.num_in_flight == text_engine.text_calls.num_in_flight == 0
        and not text_engine._running
        and not grammars._in_flight
        and not any(pool._num_running or pool.num_waiting for pool in pools)
    )


@pytest.mark.parametrize("seed", range(3))
async def test_requests_that_are_given_up_at_random_leave_nothing_behind(seed, caplog) -> None:
    rng = random.Random(seed)
    text_engine = scripted_text_engine("hello world " * 20)
    app = create_app(ServerState(text_engine), ApiSettings(max_queue=64))
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    at_once = asyncio.Semaphore(40)
    statuses: Counter[tuple[bool, int]] = Counter()

    async def one() -> None:
        async with at_once:
            path, body = rng.choice(REQUESTS)
            turns = rng.choice([0, 1, 2, 5, 15, 50, 200, 1000, STAYS])
            if path == "/v1/completions" and rng.random() < 0.3:
                body = body | {"structured_outputs": {"regex": f"[a-z]{{1,{rng.randint(1, 9)}}}"}}
            status = await send_and_leave(app, path, body, turns)
            statuses[turns == STAYS, status] += 1

    async with asyncio.timeout(120):
        await asyncio.gather(*(one() for _ in range(500)))
        await until(lambda: is_idle(text_engine))
    assert not failures
    assert not caplog.records
    assert {status for stayed, status in statuses if stayed} <= {200, 400, 429}
    assert {status for stayed, status in statuses if not stayed} <= {200, 400, 429, 499}
    assert statuses[True, 200] > 0
    assert statuses[False, 499] > 0
    assert app.state.body_memory.num_bytes == 0
    text_engine.close()

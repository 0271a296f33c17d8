"""All bodies in flight share one limit of memory; small bodies always have room."""

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from starlette.exceptions import HTTPException

from jaxserve.config import MIB
from jaxserve.errors import ConfigError
from jaxserve.front.counts import BODY_BYTES, Gauge
from jaxserve.front.shared_counts import SharedCounts
from jaxserve.testing.waiting import until
from server.app import create_app
from server.body_memory import FREE_BYTES, BodyMemory
from server.settings import ApiSettings
from server.state import ServerState

PROMPT = {"prompt": "hello"}
START = b'{"prompt": "hello", "user": "' + b"x" * (MIB // 2)


def test_bytes_beyond_the_first_of_each_body_count_until_the_share_ends() -> None:
    memory = BodyMemory(1000)
    with memory.share() as first, memory.share() as second:
        first.grow_to(FREE_BYTES)
        assert memory.num_bytes == 0
        first.grow_to(FREE_BYTES + 600)
        with pytest.raises(HTTPException) as caught:
            second.grow_to(FREE_BYTES + 401)
        assert caught.value.status_code == 503
        second.grow_to(FREE_BYTES + 400)
        assert memory.num_bytes == memory.limit
        with memory.share() as third:
            third.grow_to(FREE_BYTES)
    assert memory.num_bytes == 0


def test_the_limit_is_that_of_all_fronts() -> None:
    with closing(SharedCounts.create(num_fronts=2, num_engines=1)) as main:
        first, second = (
            BodyMemory(1000, Gauge(SharedCounts.attach(os.dup(main.fileno()), **sizes), BODY_BYTES))
            for sizes in ({"index": i, "num_fronts": 2, "num_engines": 1} for i in range(2))
        )
        with first.share() as share, second.share() as other:
            share.grow_to(FREE_BYTES + 600)
            with pytest.raises(HTTPException):
                other.grow_to(FREE_BYTES + 401)
            other.grow_to(FREE_BYTES + 400)
            assert first.num_bytes == second.num_bytes == 1000
        assert first.num_bytes == second.num_bytes == 0


def test_the_limit_is_at_least_that_of_one_body() -> None:
    with pytest.raises(ConfigError, match="--max-body-memory-mib .* --max-body-mib, 8"):
        ApiSettings(max_body_memory_mib=7)


async def test_bodies_beyond_the_limit_get_a_503_and_small_ones_are_served(
    make_client, check_error
) -> None:
    ends = asyncio.Event()

    async def paused() -> AsyncIterator[bytes]:
        yield START
        await ends.wait()
        yield b'"}'

    async with make_client(max_body_mib=1, max_body_memory_mib=1) as client:
        memory = client._transport.app.state.body_memory
        post = client.post
        uploads = [asyncio.create_task(post("/v1/completions", content=paused())) for _ in "12"]
        await until(lambda: memory.num_bytes == 2 * (len(START) - FREE_BYTES))
        refused = await post("/v1/completions", content=START + b'"}')
        assert "--max" not in check_error(refused, 503)
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["connection"] == "close"
        assert (await post("/v1/completions", json=PROMPT)).status_code == 200
        ends.set()
        assert [(await upload).status_code for upload in uploads] == [200, 200]
        assert memory.num_bytes == 0
        assert (await post("/v1/completions", content=START + b'"}')).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (START, 400),
        (START + b'"}', 200),
        (START + b'", "prompt": 5}', 400),
        (START * 3, 413),
        (b'{"prompt": "a", "x": [' + b"[]," * MIB, 413),
    ],
)
async def test_the_memory_is_given_back_however_a_request_ends(make_client, body, status) -> None:
    async with make_client(max_body_mib=1) as client:
        memory = client._transport.app.state.body_memory

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100_000):
                yield body[start : start + 100_000]

        assert (await client.post("/v1/completions", content=parts())).status_code == status
        assert memory.num_bytes == 0


async def test_the_memory_is_given_back_when_the_client_disconnects(text_engine) -> None:
    app = create_app(ServerState(text_engine), ApiSettings())
    messages = [
        {"type": "http.request", "body": START, "more_body": True},
        {"type": "http.disconnect"},
    ]
    counted: list[int] = []

    async def receive() -> dict:
        counted.append(app.state.body_memory.num_bytes)
        return messages.pop(0)

    async def send(message: dict) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    assert counted == [0, len(START) - FREE_BYTES]
    assert app.state.body_memory.num_bytes == 0


async def test_a_decompressed_body_counts_in_full(make_client, check_error) -> None:
    body = gzip.compress(json.dumps(PROMPT | {"user": "x" * 3 * MIB}).encode())
    assert len(body) < FREE_BYTES
    async with make_client(max_body_mib=4, max_body_memory_mib=4) as client:
        memory = client._transport.app.state.body_memory
        memory.add(2 * MIB)  # what other bodies take
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        reply = await client.post("/v1/completions", content=body, headers=headers)
        check_error(reply, 503)
        assert memory.num_bytes == 2 * MIB

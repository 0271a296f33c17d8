"""All bodies in flight share one limit of memory; small bodies always have room."""

import asyncio
import contextlib
import gzip
import json
import random
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.exceptions import HTTPException

from jaxserve.config import MIB
from jaxserve.errors import ConfigError
from jaxserve.testing.waiting import until
from server.app import create_app
from server.body_memory import FREE_BYTES, MIN_BYTES_PER_S, PAUSE_S, BodyMemory, BodyShare
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


def test_the_limit_is_at_least_that_of_one_body() -> None:
    with pytest.raises(ConfigError, match="--max-body-memory-mib .* --max-body-mib, 8"):
        ApiSettings(max_body_memory_mib=7)


def test_fronts_divide_the_limit_but_each_can_take_one_body() -> None:
    assert ApiSettings().share(1) == ApiSettings()
    assert ApiSettings(max_body_memory_mib=128).share(4).max_body_memory_mib == 32
    assert ApiSettings(max_body_memory_mib=128).share(100).max_body_memory_mib == 8


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
        memory.num_bytes = 2 * MIB  # what other bodies take
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        reply = await client.post("/v1/completions", content=body, headers=headers)
        check_error(reply, 503)
        assert memory.num_bytes == 2 * MIB


# Bodies that are too slow.


class Clock:
    """A clock that stands still."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shares(clock) -> Iterator[list[BodyShare]]:
    """Four shares of one memory of 1000 bytes, which record that they are evicted."""
    memory = BodyMemory(1000, clock=clock)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(memory.share()) for _ in range(4)]
    assert memory.num_bytes == 0


def evicted(shares: list[BodyShare]) -> list[int]:
    return [i for i, share in enumerate(shares) if share.is_evicted]


def test_the_longest_pause_ends_first_and_no_more_than_necessary(clock, shares) -> None:
    for share in shares[:3]:
        share.grow_to(FREE_BYTES + 300)
        clock.now_s += 1.0
    clock.now_s += PAUSE_S
    shares[3].grow_to(FREE_BYTES + 100)
    assert evicted(shares) == []
    shares[3].grow_to(FREE_BYTES + 200)
    assert evicted(shares) == [0]
    shares[3].grow_to(FREE_BYTES + 900)
    assert evicted(shares) == [0, 1, 2]
    assert shares[3]._memory.num_bytes == 900
    for share in shares[:3]:
        with pytest.raises(HTTPException, match="paused for over 2 s") as caught:
            share.grow_to(FREE_BYTES + 301)
        assert caught.value.status_code == 408
        with pytest.raises(HTTPException):
            share.received()


def test_nothing_is_evicted_in_vain(clock, shares) -> None:
    """Bodies that are in time, that have arrived, or that take nothing keep what they have."""
    for share in shares[:3]:
        share.grow_to(FREE_BYTES + 300)
    shares[0].received()
    clock.now_s += PAUSE_S + 1
    shares[1].grow_to(FREE_BYTES + 301)
    clock.now_s += 1 / MIN_BYTES_PER_S / 2
    with pytest.raises(HTTPException) as caught:  # the third alone has too little
        shares[3].grow_to(FREE_BYTES + 400)
    assert caught.value.status_code == 503
    assert evicted(shares) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_body_at_the_slowest_rate_is_never_evicted(seed) -> None:
    """Whatever its pieces and the pauses between them, up to `PAUSE_S`."""
    rng, clock = random.Random(seed), Clock()
    memory = BodyMemory(4 * MIB, clock=clock)
    with memory.share() as slow:
        size = 0
        while size < 2 * MIB:
            pause_s = rng.uniform(0, PAUSE_S)
            clock.now_s += pause_s
            memory.make_room(4 * MIB)  # evicts the body if it may
            size += max(int(pause_s * MIN_BYTES_PER_S) + 1, rng.randrange(1 << 16))
            slow.grow_to(size)
        slow.received()


def test_a_trickle_is_no_progress(clock) -> None:
    memory = BodyMemory(1000, clock=clock)
    with memory.share() as trickle, memory.share() as other:
        trickle.grow_to(FREE_BYTES + 900)
        for i in range(5):
            clock.now_s += 1.0
            trickle.grow_to(FREE_BYTES + 901 + i)
        clock.now_s += 0.5
        other.grow_to(FREE_BYTES + 1000)
        assert trickle.is_evicted


async def test_paused_uploads_do_not_lock_out_another(make_client, check_error, clock) -> None:
    async def paused() -> AsyncIterator[bytes]:
        yield START
        await asyncio.Event().wait()

    async with make_client(max_body_mib=1, max_body_memory_mib=1) as client:
        memory = client._transport.app.state.body_memory
        memory.clock = clock
        post = client.post
        uploads = [asyncio.create_task(post("/v1/completions", content=paused())) for _ in "12"]
        await until(lambda: memory.num_bytes == 2 * (len(START) - FREE_BYTES))
        whole = START + b'"}'
        check_error(await post("/v1/completions", content=whole), 503)
        clock.now_s += PAUSE_S + 0.1
        assert (await post("/v1/completions", content=whole)).status_code == 200
        done, waiting = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1), "one was enough"
        (ended,) = done
        assert "other requests needed its memory" in check_error(ended.result(), 408)
        assert ended.result().headers["connection"] == "close"
        for upload in waiting:
            upload.cancel()
        await asyncio.wait(uploads)
        await until(lambda: memory.num_bytes == 0)

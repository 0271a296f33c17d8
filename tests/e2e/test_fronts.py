"""One engine with two front processes (``--api-server-count 2``)."""

import asyncio
import random

import psutil
import pytest

from jaxserve.testing.waiting import until


@pytest.fixture(scope="module")
def server(serve, tiny_model):
    with serve(tiny_model, "--api-server-count", "2") as server:
        yield server


def children(server, module) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if module in child.cmdline()]


def make_requests(count: int, *, seed: int) -> list[dict]:
    """Returns long requests with random prompts; every other one is sampled."""
    rng = random.Random(seed)
    return [
        {
            "model": "tiny",
            "prompt": [rng.randrange(1, 250) for _ in range(rng.randrange(1, 60))],
            "max_tokens": 180,
            "temperature": float(i % 2),
            "seed": i,
            "extra_body": {"ignore_eos": True},
        }
        for i in range(count)
    ]


async def test_streams_of_both_fronts_go_on_when_the_engine_is_killed(server) -> None:
    requests = make_requests(12, seed=9)
    began = [asyncio.Event() for _ in requests]
    async with server.async_client() as client:
        alone = [(await client.completions.create(**r)).choices[0].text for r in requests]

        async def text(index: int) -> str:
            found = ""
            stream = await client.completions.create(**requests[index], stream=True)
            async for chunk in stream:
                began[index].set()
                found += chunk.choices[0].text
            return found

        streams = [asyncio.create_task(text(index)) for index in range(len(requests))]
        await asyncio.wait(
            [asyncio.create_task(event.wait()) for event in began],
            return_when=asyncio.FIRST_COMPLETED,
        )
        fronts = children(server, "server.front")
        served = [
            sum(c.status == psutil.CONN_ESTABLISHED for c in front.net_connections())
            for front in fronts
        ]
        assert len(served) == 2
        assert min(served) >= 2, "both fronts have streams"
        (engine,) = children(server, "jaxserve.engine.process")
        engine.kill()
        assert await asyncio.gather(*streams) == alone
    await until(lambda: server.metric("engine_restarts_total", engine="0") == 1)
    await server.until_idle()

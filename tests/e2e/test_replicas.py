"""One server with two engines (``--data-parallel-size 2``)."""

import asyncio

import pytest


@pytest.fixture(scope="module")
def server(serve, tiny_model):
    with serve(tiny_model, "--data-parallel-size", "2") as server:
        yield server


async def test_both_engines_run_and_give_equal_completions(server) -> None:
    request = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 30, "temperature": 0}
    async with server.async_client() as client:
        replies = await asyncio.gather(*(client.completions.create(**request) for _ in range(24)))
    assert len({reply.choices[0].text for reply in replies}) == 1
    for engine in ("0", "1"):
        assert server.metric("steps_total", engine=engine) > 0
        assert server.metric("num_requests_running", engine=engine) == 0

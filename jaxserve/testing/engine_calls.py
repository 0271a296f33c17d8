"""Requests of tests to engine clients with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from jaxserve.client.engine_client import EngineClient
from jaxserve.errors import EngineDeadError
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel, expected_tokens

ENDLESS = SamplingParams(max_tokens=1000, seed=0)
SLOW = "fake:step_s=0.01"
PROMPT = (1, 2, 3)
TIMEOUT_S = 60  # for waits that only a defect makes this long


def generate(
    client: EngineClient,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams = ENDLESS,
    request_id: str = "a",
    **fields: Any,
) -> AbstractAsyncContextManager[AsyncGenerator[RequestOutput, None]]:
    """Returns the outputs of a request. ``fields``: further fields of `Submit`."""
    return contextlib.aclosing(client.generate(Submit(request_id, list(prompt), params, **fields)))


async def collect(
    client: EngineClient,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams = ENDLESS,
    request_id: str = "a",
    **fields: Any,
) -> list[int]:
    """Returns all tokens of a request."""
    tokens: list[int] = []
    async with (
        asyncio.timeout(TIMEOUT_S),
        generate(client, prompt, params, request_id, **fields) as outputs,
    ):
        async for output in outputs:
            tokens += output.token_ids
    return tokens


def expect(client: EngineClient, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Returns the tokens that the engines must generate."""
    return expected_tokens(prompt, params, FakeModel(), context_length=client.ready.max_model_len)


def requests_held(client: EngineClient) -> list[int]:
    """Returns the number of requests on each engine, as the engine reports it."""
    return [(s.num_running + s.num_waiting) for s in client.stats.values()]


def is_healthy(client: EngineClient) -> bool:
    """Whether every engine can serve."""
    with contextlib.suppress(EngineDeadError):
        client.check_health()
        return True
    return False


async def start_streams(
    client: EngineClient, number: int, params: SamplingParams = ENDLESS
) -> list[asyncio.Task[list[int]]]:
    """Returns tasks that read streams to their end. All streams have begun."""
    begun = asyncio.Semaphore(0)

    async def read(request_id: str) -> list[int]:
        tokens: list[int] = []
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                generate(client, params=params, request_id=request_id) as outputs,
            ):
                async for output in outputs:
                    tokens += output.token_ids
                    begun.release()
        finally:
            begun.release()
        return tokens

    tasks: list[asyncio.Task[list[int]]] = []
    for i in range(number):
        tasks.append(asyncio.create_task(read(f"stream {i}")))
        await begun.acquire()
    return tasks

"""A server with a tiny random model: its completions must not depend on other requests."""

import asyncio
import random

import numpy as np
import openai
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.testing.reference import Reference
from jaxserve.testing.tolerance import assert_close


@pytest.fixture(scope="module")
def server(serve, tiny_model):
    with serve(tiny_model) as server:
        yield server


def make_requests(count: int, *, seed: int) -> list[dict]:
    """Returns requests with prompts and completions of many lengths; every other one is sampled."""
    rng = random.Random(seed)
    return [
        {
            "model": "tiny",
            "prompt": [rng.randrange(1, 250) for _ in range(rng.randrange(1, 90))],
            "max_tokens": rng.randrange(1, 120),
            "temperature": float(i % 2),
            "seed": i,
        }
        for i in range(count)
    ]


async def stream_text(client: openai.AsyncOpenAI, request: dict) -> tuple[str, str | None]:
    text, reason = "", None
    async for chunk in await client.completions.create(**request, stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    return text, reason


async def test_64_concurrent_streams_equal_single_requests(server) -> None:
    """The blocks hold about half of the 8 requests that run at a time."""
    requests = make_requests(64, seed=1)
    with server.client() as client:
        alone = [client.completions.create(**request).choices[0] for request in requests]
    preemptions = server.metric("num_preemptions_total", engine="0")
    compilations = server.metric("compilations_total", engine="0")
    async with server.async_client() as client:
        together = await asyncio.gather(*(stream_text(client, r) for r in requests))
    assert together == [(choice.text, choice.finish_reason) for choice in alone]
    assert server.metric("num_preemptions_total", engine="0") > preemptions
    # Nothing is compiled once the server is ready, whatever requests run together.
    assert server.metric("compilations_total", engine="0") == compilations
    await server.until_idle()


def test_embeddings_match_the_reference(server, tiny_model) -> None:
    """Two of the prompts fit in one step together; the third takes several steps."""
    rng = random.Random(5)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in (1, 9, 100)]
    reference = Reference(dict(open_checkpoint(str(tiny_model)).tensors()))
    hidden = [reference.hidden(prompt) for prompt in prompts]
    with server.client() as client:
        last = client.embeddings.create(model="tiny", input=prompts)
        mean = client.embeddings.create(
            model="tiny",
            input=prompts,
            encoding_format="float",
            extra_body={"pooling": "mean", "normalize": False},
        )
        width = hidden[0].shape[1]
        again = client.embeddings.create(model="tiny", input=prompts[1], dimensions=width)
        with pytest.raises(openai.BadRequestError, match=f"dimensions must be {width}"):
            client.embeddings.create(model="tiny", input=prompts[1], dimensions=width - 1)
    for i, states in enumerate(hidden):
        expected = states[-1] / np.linalg.norm(states[-1])
        count = len(states)
        assert_close(last.data[i].embedding, expected, num_tokens=count)
        # Twice the tokens, because the mean adds rounding errors.
        assert_close(mean.data[i].embedding, states.mean(0), num_tokens=2 * count)
    assert_close(again.data[0].embedding, last.data[1].embedding, num_tokens=len(hidden[1]))
    assert last.usage.prompt_tokens == last.usage.total_tokens == 110


async def test_a_disconnect_frees_the_blocks(server) -> None:
    def num_aborted() -> float:
        return server.metric("request_success_total", finished_reason="abort")

    before = num_aborted()
    async with server.async_client() as client, asyncio.timeout(60):
        kv_usage = 0.0
        # The model is fast: a completion may finish before the server notices the disconnect.
        while num_aborted() == before:
            stream = await client.completions.create(
                model="tiny",
                prompt=[5] * 16,
                max_tokens=230,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(stream)
            kv_usage = server.metric("kv_cache_usage_perc", engine="0")
            await stream.close()
            await server.until_idle()
    assert kv_usage > 0


def test_n_choices_have_logprobs_and_count_in_usage(server) -> None:
    with server.client() as client:
        reply = client.completions.create(
            model="tiny", prompt=[1, 2, 3], n=3, seed=1, max_tokens=5, logprobs=2
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        num_tokens = 0
        for choice in reply.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
            num_tokens += len(choice.logprobs.token_logprobs)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == 3
        assert reply.usage.completion_tokens == num_tokens

"""The stream of outputs of one request."""

import asyncio
import random

import pytest

from jaxserve.client.output_stream import OutputStream
from jaxserve.errors import EngineDeadError
from jaxserve.ipc.messages import FinishReason, RequestOutput, TokenLogprobs


def with_logprobs(tokens):
    return [TokenLogprobs((token,), (-token / 10,), 1) for token in tokens]


async def test_each_output_is_read_once_in_order():
    stream = OutputStream()
    for token in (1, 2):
        stream.push(RequestOutput("a", [token]))
        assert await anext(stream) == RequestOutput("a", [token])
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(RequestOutput("a", [3], FinishReason.STOP, stop_reason=3))
    assert await reader == RequestOutput("a", [3], FinishReason.STOP, stop_reason=3)


async def test_a_slow_reader_gets_pending_outputs_as_one():
    stream = OutputStream()
    stream.push(RequestOutput("a", [1], num_cached_tokens=16, scheduled_s=2.5))
    stream.push(RequestOutput("a", [2, 3], num_cached_tokens=16, scheduled_s=2.5))
    last = RequestOutput("a", [4], FinishReason.STOP, 4, num_cached_tokens=16, scheduled_s=2.5)
    stream.push(last)
    assert await anext(stream) == RequestOutput(
        "a", [1, 2, 3, 4], FinishReason.STOP, 4, num_cached_tokens=16, scheduled_s=2.5
    )


async def test_an_abort_of_the_front_keeps_what_the_engine_said():
    stream = OutputStream()
    stream.push(RequestOutput("a", [1], num_cached_tokens=16, scheduled_s=2.5))
    stream.push(RequestOutput("a", [], FinishReason.ABORT))
    assert await anext(stream) == RequestOutput(
        "a", [1], FinishReason.ABORT, num_cached_tokens=16, scheduled_s=2.5
    )


@pytest.mark.parametrize("seed", range(10))
async def test_no_token_is_lost_in_any_order_of_pushes_and_reads(seed):
    rng = random.Random(seed)
    stream, sent, got, logprobs, ready = OutputStream(), [], [], [], False
    while len(sent) < 200:
        if rng.random() < 0.6:
            tokens = [rng.randrange(100) for _ in range(rng.randrange(4))]
            sent += tokens
            stream.push(RequestOutput("a", list(tokens), logprobs=with_logprobs(tokens)))
            ready = True
        elif ready:
            output = await anext(stream)
            got += output.token_ids
            logprobs += output.logprobs
            ready = False
    stream.push(RequestOutput("a", [], FinishReason.ABORT))
    output = await anext(stream)
    assert got + output.token_ids == sent
    assert logprobs + (output.logprobs or []) == with_logprobs(sent)
    assert output.finish_reason == FinishReason.ABORT


async def test_an_error_is_raised_after_earlier_outputs():
    stream = OutputStream()
    stream.push(RequestOutput("a", [1]))
    stream.fail(EngineDeadError("gone"))
    assert (await anext(stream)).token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)


async def test_an_error_wakes_the_reader():
    stream = OutputStream()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await reader

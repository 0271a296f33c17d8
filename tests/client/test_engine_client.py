"""The client of the engine processes: streams, failures, draining and closing."""

import asyncio
import os

import pytest
import uvloop

from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.engine_calls import (
    ENDLESS,
    SLOW,
    collect,
    expect,
    generate,
    is_healthy,
    requests_held,
    start_streams,
)
from jaxserve.testing.waiting import until


async def test_concurrent_streams_get_the_same_tokens_as_alone(start):
    client = await start(num_engines=2, max_num_seqs=16)
    jobs = [
        ([i, *range(i % 40)], SamplingParams(max_tokens=1 + 7 * i % 90, seed=i, top_p=0.9))
        for i in range(64)
    ]
    completions = await asyncio.gather(
        *(collect(client, prompt, params, f"r{i}") for i, (prompt, params) in enumerate(jobs))
    )
    assert completions == [expect(client, prompt, params) for prompt, params in jobs]
    totals = [stats.total_generation_tokens for stats in client.stats.values()]
    assert sum(totals) == sum(len(completion) for completion in completions)
    assert min(totals) > 0
    assert requests_held(client) == [0, 0]


async def test_the_last_output_has_the_finish_reason(start):
    client = await start("fake:eos_after=4")
    async with generate(client, params=SamplingParams(seed=1), eos_token_id=9) as outputs:
        got = [output async for output in outputs]
    assert sum((output.token_ids for output in got), [])[3:] == [9]
    assert [output.finish_reason for output in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1].finish_reason == FinishReason.STOP
    params = SamplingParams(max_tokens=2, seed=1, logprobs=3)
    async with generate(client, params=params, eos_token_id=9) as outputs:
        got = [output async for output in outputs]
    assert got[-1].finish_reason == FinishReason.LENGTH
    logprobs = sum((output.logprobs for output in got), [])
    assert [len(entry.token_ids) for entry in logprobs] == [4, 4]


async def test_requests_go_to_the_engine_with_the_smallest_score(start):
    client = await start(SLOW, num_engines=2, max_num_seqs=2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(client, request_id=f"r{i}")) for i in range(3)]
        await until(lambda: sorted(requests_held(client)) == [1, 2])
        tasks += [group.create_task(collect(client, request_id="r3"))]
        await until(lambda: requests_held(client) == [2, 2])
        # Both engines are full: new requests wait, and are spread evenly.
        tasks += [group.create_task(collect(client, request_id=f"r{i}")) for i in range(4, 10)]
        await until(lambda: requests_held(client) == [5, 5])
        assert {(s.num_running, s.num_waiting) for s in client.stats.values()} == {(2, 3)}
        for task in tasks:
            task.cancel()


async def test_finished_requests_do_not_count(start):
    client = await start(SLOW, num_engines=2)
    (endless,) = await start_streams(client, 1)
    for _ in range(5):
        await collect(client, (1, 2), SamplingParams(max_tokens=2, seed=1))
    # The first engine ran only the request with three prompt tokens all the time.
    assert [stats.total_prompt_tokens for stats in client.stats.values()] == [3, 10]
    endless.cancel()


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_a_stream_frees_its_row_and_blocks(start, how):
    client = await start(SLOW)
    if how == "close":
        async with generate(client) as outputs:
            for _ in range(3):
                await anext(outputs)
    else:
        (task,) = await start_streams(client, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert client.num_in_flight == 0
    # An engine that becomes idle reports it at once, not with the next heartbeat.
    await until(lambda: requests_held(client) == [0] and client.stats[0].kv_usage == 0)
    assert client.stats[0].total_generation_tokens < ENDLESS.max_tokens
    params = SamplingParams(max_tokens=5, seed=3)
    assert await collect(client, params=params) == expect(client, (1, 2, 3), params)


async def test_a_slow_reader_gets_the_rest_at_once(start):
    client = await start()
    params = SamplingParams(max_tokens=500, seed=2, logprobs=0)
    async with generate(client, params=params) as outputs:
        got = [await anext(outputs)]
        await until(lambda: client.stats[0].total_generation_tokens == 500)
        got += [output async for output in outputs]
    assert len(got) == 2
    tokens = got[0].token_ids + got[1].token_ids
    assert tokens == expect(client, (1, 2, 3), params)
    assert [entry.token_ids for entry in got[0].logprobs + got[1].logprobs] == [
        (t,) for t in tokens
    ]
    assert [output.finish_reason for output in got] == [None, FinishReason.LENGTH]


async def test_rejects_an_id_in_use(start):
    client = await start(SLOW, num_engines=2)
    async with generate(client, request_id="twice") as outputs:
        await anext(outputs)
        with pytest.raises(InvalidRequestError, match="'twice' is in use") as caught:
            await collect(client, request_id="twice")
        assert caught.value.param == "request_id"
        await anext(outputs)
    params = SamplingParams(max_tokens=3, seed=1)
    completion = await collect(client, request_id="twice", params=params)
    assert completion == expect(client, (1, 2, 3), params)


async def test_health_fails_if_an_engine_with_requests_is_stuck(start, engines):
    client = await start(SLOW, stuck_after_s=0.5)
    (engine,) = engines()
    (stream,) = await start_streams(client, 1)
    engine.suspend()
    await until(lambda: not is_healthy(client))
    with pytest.raises(
        EngineDeadError, match=rf"engine 0 \(pid {engine.pid}\) is stuck: .*in flight: 1"
    ):
        client.check_health()
    engine.resume()
    await until(lambda: is_healthy(client))
    stream.cancel()


async def test_health_fails_if_an_engine_is_stuck_after_its_requests_were_aborted(start, engines):
    client = await start(SLOW, stuck_after_s=0.5)
    (engine,) = engines()
    stream = client.generate(Submit("a", [1], ENDLESS))
    await anext(stream)
    engine.suspend()
    await stream.aclose()
    assert client.num_in_flight == 0
    await until(lambda: not is_healthy(client))
    engine.resume()
    await until(lambda: is_healthy(client))


async def test_a_request_that_cannot_be_sent_is_not_in_flight(start):
    client = await start()
    stream = client.generate(Submit("a", [2**70], SamplingParams(seed=1)))
    with pytest.raises(OverflowError):
        await anext(stream)
    assert client.num_in_flight == 0


async def test_drain_waits_for_the_end_of_every_request(start):
    client = await start("fake:step_s=0.001", num_engines=2)
    params = SamplingParams(max_tokens=50, seed=1)
    streams = await start_streams(client, 4, params)
    await client.drain(timeout_s=60)
    assert client.num_in_flight == 0
    assert await asyncio.gather(*streams) == [expect(client, (1, 2, 3), params)] * 4
    await client.drain(timeout_s=60)


async def test_drain_aborts_requests_that_take_too_long(start):
    client = await start(SLOW)
    async with generate(client) as outputs:
        await anext(outputs)
        await client.drain(timeout_s=0.02)
        assert client.num_in_flight == 0
        rest = [output async for output in outputs]
    assert [output.finish_reason for output in rest] == [FinishReason.ABORT]
    await until(lambda: requests_held(client) == [0] and client.stats[0].kv_usage == 0)


async def test_close_fails_requests_in_flight_and_removes_processes_and_folder(start, engines):
    client = await start(SLOW, num_engines=2)
    streams = await start_streams(client, 3)
    children = engines()
    assert len(children) == 2
    folder = client._engines.folder.path
    assert os.path.isdir(folder)
    await asyncio.gather(client.close(), client.close())
    await client.close()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(client)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.check_health()
    assert not any(child.is_running() for child in children)
    assert not os.path.exists(folder)


async def test_close_continues_when_its_caller_is_cancelled(start, engines):
    client = await start(SLOW)
    close = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    close.cancel()
    with pytest.raises(asyncio.CancelledError):
        await close
    await client.close()
    assert engines() == []


async def test_a_failing_observer_does_not_stop_the_streams(start, caplog):
    client = await start()

    def observe(outputs):
        raise RuntimeError("an observer's own trouble")

    client.on_outputs = observe
    params = SamplingParams(max_tokens=10, seed=1)
    assert await collect(client, params=params) == expect(client, (1, 2, 3), params)
    assert "an observer's own trouble" in caplog.text


async def test_observers_see_every_token(start):
    client, seen = await start(), []
    client.on_outputs = lambda event: seen.extend(
        token for output in event.outputs for token in output.token_ids
    )
    params = SamplingParams(max_tokens=40, seed=1)
    assert await collect(client, params=params) == seen


def test_the_client_works_on_uvloop():
    async def main():
        config = EngineConfig(model=ModelConfig(model="fake"))
        client = await EngineClient.start(config, factory="jaxserve.testing.fake_engine:build")
        try:
            return await collect(client, params=params) == expect(client, (1, 2, 3), params)
        finally:
            await client.close()

    params = SamplingParams(max_tokens=20, seed=1)
    assert uvloop.run(main())

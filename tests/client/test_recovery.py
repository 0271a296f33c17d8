"""Engines that die or hang: their requests continue, and they are restarted."""

import asyncio
import contextlib
import os
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.client.recovery import MAX_DELAY_S, Restarts
from jaxserve.client.totals import TOTALS, continued, latest
from jaxserve.config import STABLE_S, RecoveryConfig
from jaxserve.errors import ConfigError, EngineDeadError, RequestFailedError
from jaxserve.ipc.messages import FinishReason, StepStats
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.engine_calls import (
    PROMPT,
    SLOW,
    collect,
    expect,
    generate,
    is_healthy,
    requests_held,
    start_streams,
)
from jaxserve.testing.waiting import until

BAD_TOKEN = 77
POISONED = f"fake:step_s=0.004,fail_on_token={BAD_TOKEN}"
ONCE = RecoveryConfig(max_engine_restarts=1)
NEVER = RecoveryConfig(max_engine_restarts=0)
FINITE = SamplingParams(max_tokens=300, seed=4)

# Builds the fake engine on the first start, then raises, or sleeps with the name "hang".
UNREPEATABLE = """
import pathlib
from jaxserve.testing import fake_engine
started = pathlib.Path(__file__).with_name(f"started-{engine}")
if started.exists():
    if config.model.model.startswith("fake:step_s=0.01"):
        raise RuntimeError("the device is gone")
    time.sleep(60)
started.touch()
return fake_engine.build(config, engine, on_progress)"""

# Two engines of which the second has measured less memory.
UNEQUAL = """
import dataclasses
from jaxserve.testing import fake_engine
if config.cache.num_blocks is None:
    cache = dataclasses.replace(config.cache, num_blocks=64 if engine == 0 else 8)
    config = dataclasses.replace(config, cache=cache)
return fake_engine.build(config, engine, on_progress)"""


async def test_streams_of_a_killed_engine_continue_on_another(start, engines):
    client = await start("fake:step_s=0.004", num_engines=2)
    first, second = engines()
    streams = await start_streams(client, 6, FINITE)
    first.kill()
    await until(lambda: not is_healthy(client))
    with pytest.raises(EngineDeadError, match=r"SIGKILL|restarted"):
        client.check_health()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 6
    await until(lambda: is_healthy(client))
    assert first not in engines()
    assert second in engines()
    assert len(engines()) == 2
    assert requests_held(client) == [0, 0]
    assert len(os.listdir(client._engines.folder.path)) == 4  # two sockets for each process


async def test_streams_of_the_only_engine_continue_once_it_is_back(start, engines, caplog):
    client = await start("fake:step_s=0.004")
    (engine,) = engines()
    streams = await start_streams(client, 3, FINITE)
    engine.kill()
    await until(lambda: not is_healthy(client))
    assert client.num_in_flight == 3
    # New requests are refused meanwhile: another server may have room for them.
    with pytest.raises(EngineDeadError, match=r"SIGKILL|restarted"):
        await collect(client, request_id="new")
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 3
    assert "SIGKILL" in caplog.text
    assert "restart 1 of 5" in caplog.text


async def test_new_requests_can_wait_for_an_engine(start, engines):
    client = await start(SLOW, waits_for_engines=True)
    (engine,) = engines()
    engine.kill()
    await until(lambda: not is_healthy(client))
    params = SamplingParams(max_tokens=5, seed=3)
    assert await collect(client, params=params) == expect(client, PROMPT, params)


async def test_outputs_after_a_crash_continue_those_before_it(start, engines):
    client = await start("fake:step_s=0.004")
    (engine,) = engines()
    params = SamplingParams(max_tokens=200, seed=8, logprobs=2, prompt_logprobs=1)
    outputs = []
    async with generate(client, params=params) as stream:
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 3:
                engine.kill()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expect(client, PROMPT, params)
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token_ids[0] for entry in entries] == tokens
    assert outputs[0].prompt_logprobs is not None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == FinishReason.LENGTH
    # For the queue time in the metrics: when the request ran first.
    assert len({output.scheduled_s for output in outputs}) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_streams_survive_many_crashes_of_both_engines(start, engines, seed):
    recovery = RecoveryConfig(max_engine_restarts=100)
    client = await start("fake:step_s=0.002", num_engines=2, recovery=recovery)
    rng = random.Random(seed)
    jobs = [
        ([i, *range(i % 40)], SamplingParams(max_tokens=1 + 17 * i % 300, seed=i, min_tokens=i % 3))
        for i in range(40)
    ]
    done = asyncio.gather(
        *(collect(client, prompt, params, f"r{i}") for i, (prompt, params) in enumerate(jobs)),
        return_exceptions=True,
    )
    victim = rng.choice(engines())
    victim.kill()
    completions = await done
    assert completions == [expect(client, prompt, params) for prompt, params in jobs]
    assert client.num_in_flight == 0


async def test_a_failed_step_fails_only_the_requests_that_ran_in_two(start, caplog):
    client = await start(POISONED, max_num_seqs=2)
    bystander = asyncio.create_task(collect(client, params=FINITE, request_id="waits"))
    await until(lambda: client.stats[0].num_running == 1)
    with pytest.raises(RequestFailedError, match=r"failed 2 times .*asked to fail"):
        await collect(client, [1, BAD_TOKEN], request_id="bad")
    with contextlib.suppress(RequestFailedError):  # it ran beside the bad one both times
        assert await bystander == expect(client, PROMPT, FINITE)
    await until(lambda: is_healthy(client))
    params = SamplingParams(max_tokens=5, seed=3)
    assert await collect(client, params=params) == expect(client, PROMPT, params)
    assert "Traceback" in caplog.text


async def test_requests_that_waited_during_two_crashes_are_answered(start):
    client = await start(POISONED, max_num_seqs=1)
    async with asyncio.TaskGroup() as group:
        bad = group.create_task(_outcome(collect(client, [1, BAD_TOKEN], request_id="bad")))
        waiting = [
            group.create_task(collect(client, params=FINITE, request_id=f"w{i}")) for i in range(5)
        ]
    assert isinstance(bad.result(), RequestFailedError)
    assert [task.result() for task in waiting] == [expect(client, PROMPT, FINITE)] * 5


async def test_a_hung_engine_is_replaced(start, engines):
    client = await start("fake:step_s=0.004", recovery=RecoveryConfig(engine_timeout=3))
    (engine,) = engines()
    streams = await start_streams(client, 3, FINITE)
    engine.suspend()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 3
    await until(lambda: is_healthy(client))
    assert engine not in engines()


async def test_a_silent_engine_gets_no_new_requests(start, engines):
    client = await start(SLOW, num_engines=2, stuck_after_s=3)
    first, _ = engines()
    first.suspend()
    await until(lambda: not is_healthy(client))
    params = SamplingParams(max_tokens=5, seed=3)
    for i in range(4):
        assert await collect(client, params=params, request_id=str(i)) == expect(
            client, PROMPT, params
        )
    first.resume()
    await until(lambda: is_healthy(client))


async def test_a_restart_that_hangs_is_tried_again(start, engines, factory):
    recovery = RecoveryConfig(engine_timeout=3, max_engine_restarts=1)
    client = await start("fake", factory=factory(UNREPEATABLE), recovery=recovery)
    (engine,) = engines()
    engine.kill()
    async with asyncio.timeout(30):  # only a defect takes this long
        assert "stuck" in str(await client.gone)
    assert engines() == []


async def test_requests_fail_once_the_restarts_are_used_up(start, engines, factory, caplog):
    client = await start(SLOW, factory=factory(UNREPEATABLE), recovery=ONCE)
    streams = await start_streams(client, 2)
    engines()[0].kill()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 2
    assert "the device is gone" in str(results[0])
    assert "the device is gone" in str(client.gone.result())
    with pytest.raises(EngineDeadError, match="the device is gone"):
        client.check_health()
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await collect(client)
    assert client.num_in_flight == 0
    assert "restarts of engine 0 are used up" in caplog.text


async def test_without_restarts_the_other_engine_takes_over(start, engines):
    client = await start("fake:step_s=0.004", num_engines=2, recovery=NEVER)
    first, second = engines()
    streams = await start_streams(client, 4, FINITE)
    first.kill()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 4
    assert not is_healthy(client)
    assert not client.gone.done()
    last = asyncio.create_task(collect(client))
    await until(lambda: client.num_in_flight == 1)
    second.kill()
    with pytest.raises(EngineDeadError, match=r"engine 1 .*SIGKILL"):
        await last
    assert client.gone.done()


@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_a_parked_request_can_end(start, engines, factory, how):
    body = UNREPEATABLE.replace('raise RuntimeError("the device is gone")', "time.sleep(60)")
    client = await start(SLOW, factory=factory(body))
    async with generate(client) as outputs:
        await anext(outputs)
        engines()[0].kill()
        await until(lambda: len(client._parked) == 1)
        if how == "abort":
            client.abort(["a"])
            assert [output.finish_reason async for output in outputs][-1] == FinishReason.ABORT
    assert client.num_in_flight == 0
    await client.drain(timeout_s=0)


async def test_a_restarted_engine_has_the_sizes_it_had(start, engines, factory):
    body = """
import dataclasses
from jaxserve.testing import fake_engine
config.cache.num_blocks or object()
cache = dataclasses.replace(config.cache, num_blocks=config.cache.num_blocks or 40)
return fake_engine.build(dataclasses.replace(config, cache=cache), engine, on_progress)"""
    client = await start("fake:step_s=0.004", factory=factory(body), max_num_seqs=3)
    (engine,) = engines()
    before = client._replicas[0].ready.result()
    engine.kill()
    await until(lambda: not is_healthy(client))
    await until(lambda: is_healthy(client))
    assert client._replicas[0].ready.result() == before
    assert (before.num_blocks, before.max_num_seqs) == (40, 3)


async def test_a_restarted_engine_refuses_other_weights(start, engines, factory, tmp_path):
    body = """
import dataclasses, msgspec, pathlib
from jaxserve.testing import fake_engine
built = fake_engine.build(config, engine, on_progress)
files = str(pathlib.Path(__file__).with_name("model.txt").stat().st_size)
ready = msgspec.structs.replace(built.ready, fingerprint=files)
return dataclasses.replace(built, ready=ready)"""
    model = tmp_path / "model.txt"
    model.write_text("old")
    client = await start(SLOW, factory=factory(body), recovery=ONCE)
    streams = await start_streams(client, 1)
    model.write_text("something new")
    engines()[0].kill()
    with pytest.raises(EngineDeadError, match="files of the model have changed"):
        await streams[0]


async def test_every_request_fits_every_engine(start, factory):
    client = await start("fake", num_engines=2, factory=factory(UNEQUAL))
    lengths = [ready.max_model_len for ready in client.engines.values()]
    assert lengths[0] > lengths[1]
    assert client.ready.max_model_len == lengths[1]
    assert client.ready.num_blocks == 8


async def test_totals_continue_after_a_restart(start, engines):
    client = await start("fake:step_s=0.002")
    (engine,) = engines()
    params = SamplingParams(max_tokens=20, seed=1)
    await collect(client, params=params)
    before = client.stats[0]
    engine.kill()
    await until(lambda: not is_healthy(client))
    await until(lambda: is_healthy(client))
    assert client.stats[0].total_generation_tokens == before.total_generation_tokens
    assert client.stats[0].total_restarts == 1
    seen = []
    client.on_outputs = lambda event: seen.append(event.stats)
    await collect(client, params=params)
    assert client.stats[0].total_generation_tokens == before.total_generation_tokens + 20
    assert min(stats.total_steps for stats in seen) >= before.total_steps


def test_the_sum_of_states_has_every_total():
    before = StepStats(**dict.fromkeys(TOTALS, 5), accepted_per_position=(3, 1))
    now = StepStats(num_running=2, kv_usage=0.5, **dict.fromkeys(TOTALS, 2))
    both = continued(before, now)
    assert [getattr(both, name) for name in TOTALS] == [7] * len(TOTALS)
    assert both.accepted_per_position == (3, 1)
    assert (both.num_running, both.num_waiting, both.kv_usage) == (2, 0, 0.5)
    assert len(TOTALS) >= 9


def test_the_later_of_two_states_has_the_larger_totals():
    a = StepStats(num_running=2, **dict.fromkeys(TOTALS, 5), accepted_per_position=(3, 1))
    b = StepStats(num_running=1, **dict.fromkeys(TOTALS, 7), accepted_per_position=(3,))
    assert latest(a, b) == msgspec.structs.replace(a, **dict.fromkeys(TOTALS, 7))
    assert latest(b, a) == msgspec.structs.replace(b, accepted_per_position=(3, 1))


def test_restarts_are_delayed_longer_each_time():
    restarts = Restarts(limit=9)
    delays = [restarts.next_delay_s(0.0) for _ in range(10)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, MAX_DELAY_S, MAX_DELAY_S, None]
    assert restarts.next_delay_s(0.0) is None


@given(st.lists(st.floats(0, 2 * STABLE_S), max_size=30), st.integers(0, 5))
def test_only_crashes_in_a_row_use_up_the_restarts(served, limit):
    restarts, in_a_row = Restarts(limit), 0
    for served_s in served:
        if served_s >= STABLE_S:
            in_a_row = 0
        is_left = in_a_row < limit
        assert (restarts.next_delay_s(served_s) is not None) == is_left
        in_a_row += is_left


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"engine_timeout": 1.5}, "--engine-timeout"), ({"max_engine_restarts": -1}, "--max-engine")],
)
def test_settings_out_of_range_are_refused(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        RecoveryConfig(**settings)


async def _outcome(work):
    try:
        return await work
    except RequestFailedError as error:
        return error

"""Several fronts use the same engines, which another process runs."""

import asyncio
import os
import random
from collections import Counter

import pytest

from jaxserve.config import RecoveryConfig
from jaxserve.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from jaxserve.ipc.messages import Abort, FinishReason, Submit, encode
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.engine_calls import (
    ENDLESS,
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

FINITE = SamplingParams(max_tokens=300, seed=4)
NEVER = RecoveryConfig(max_engine_restarts=0)
BAD_TOKEN = 77

# An engine whose main thread stops before its next step as long as the file "hold" exists.
HELD = """
import pathlib
from jaxserve.testing import fake_engine
built = fake_engine.build(config, engine, on_progress)
hold, step = pathlib.Path(__file__).with_name("hold"), built.core.step
def held_step(now):
    while hold.exists():
        time.sleep(0.005)
    return step(now)
built.core.step = held_step
return built"""


def totals(engines):
    return [replica.stats.total_generation_tokens for replica in engines.replicas.values()]


async def test_two_fronts_with_the_same_ids_get_their_own_tokens(start_main):
    main = await start_main(num_engines=2, max_num_seqs=16)
    jobs = [
        ([i, *range(i % 40)], SamplingParams(max_tokens=1 + 7 * i % 90, seed=i, top_p=0.9))
        for i in range(64)
    ]
    first, second = main.fronts.values()
    completions = await asyncio.gather(
        *(
            collect(main.fronts[i % 2 + 1], prompt, params, f"r{i // 2}")
            for i, (prompt, params) in enumerate(jobs)
        )
    )
    assert completions == [expect(first, prompt, params) for prompt, params in jobs]
    num_tokens = sum(map(len, completions))
    for engines in (first._engines, second._engines, main.supervisor):
        await until(lambda of=engines: sum(totals(of)) == num_tokens)
        assert min(totals(engines)) > 0
    assert [front.num_in_flight for front in (first, second)] == [0, 0]


async def test_each_front_observes_its_own_outputs_and_all_states(start_main):
    main = await start_main(SLOW)
    seen = {}
    tokens = {}
    for reader, client in main.fronts.items():
        seen[reader], tokens[reader] = [], []

        def observe(event, reader=reader):
            seen[reader].append(event)
            # Now, because the stream may add later tokens to the same output.
            tokens[reader] += [token for output in event.outputs for token in output.token_ids]

        client.on_outputs = observe
    params = {1: SamplingParams(max_tokens=20, seed=1), 2: SamplingParams(max_tokens=30, seed=2)}
    completions = await asyncio.gather(
        *(collect(main.fronts[reader], params=params[reader]) for reader in (1, 2))
    )
    await until(lambda: all(client.stats[0].total_steps >= 30 for client in main.fronts.values()))
    for reader, completion in zip((1, 2), completions, strict=True):
        outputs = [output for event in seen[reader] for output in event.outputs]
        assert {output.request_id for output in outputs} == {"a"}
        assert tokens[reader] == completion
    # All fronts see the steps of both requests.
    steps = [{event.stats.total_steps for event in events} for events in seen.values()]
    assert set(range(2, 30)) <= steps[0] & steps[1]


async def test_an_id_is_unique_within_a_front_only(start_main):
    main = await start_main(SLOW)
    first, second = main.fronts.values()
    async with generate(first) as outputs, generate(second) as others:
        await anext(outputs)
        await anext(others)
        with pytest.raises(InvalidRequestError, match="the request ID 'a' is in use"):
            await collect(first)
        first.abort(["a"])
        assert [output async for output in outputs][-1].finish_reason == FinishReason.ABORT
        assert (await anext(others)).request_id == "a"
        await until(lambda: requests_held(second) == [1])
        assert second.num_in_flight == 1


async def test_leaving_a_stream_frees_its_row(start_main):
    main = await start_main(SLOW)
    first, second = main.fronts.values()
    (kept,) = await start_streams(second, 1)
    async with generate(first, request_id="stream 0") as outputs:
        await anext(outputs)
    await until(lambda: requests_held(first) == [1] and requests_held(second) == [1])
    assert not kept.done()
    kept.cancel()


async def test_a_removed_reader_is_aborted_and_its_late_messages_are_dropped(start_main):
    main = await start_main(SLOW)
    first, second = main.fronts.values()
    (other, *rest) = await start_streams(second, 2)
    streams = await start_streams(first, 3)
    await until(lambda: requests_held(second) == [5])
    main.supervisor.remove_reader(1)
    main.supervisor.remove_reader(1)
    await until(lambda: requests_held(second) == [2])
    # The dead front may have sent more. These messages are handled in order.
    socket = main.replica(1)._sender._socket
    prompt_tokens = second.stats[0].total_prompt_tokens
    socket.send(encode(Submit("1:late", [1] * 50, ENDLESS)))
    socket.send(encode(Abort(["2:stream 0"])))  # shows that the message before has been received
    await until(lambda: requests_held(second) == [1])
    replica = main.replica(2)
    assert replica.load.num_sent == 0
    steps = second.stats[0].total_steps
    await until(lambda: second.stats[0].total_steps > steps + 2)
    assert requests_held(second) == [1]
    assert second.stats[0].total_prompt_tokens == prompt_tokens
    assert not os.path.exists(main.replica(1).link.events_address.removeprefix("ipc://"))
    for stream in (other, *rest, *streams):
        stream.cancel()


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_streams_of_all_fronts_survive_the_death_of_an_engine(
    start_main, engines, num_engines
):
    main = await start_main("fake:step_s=0.004", num_engines=num_engines)
    fronts = list(main.fronts.values())
    counts = {client: [] for client in fronts}
    for client in fronts:
        client.on_outputs = lambda event, seen=counts[client]: seen.append(
            (event.engine, event.stats.total_generation_tokens, event.stats.total_steps)
        )
    streams = [stream for client in fronts for stream in await start_streams(client, 3, FINITE)]
    engines()[0].kill()
    await until(lambda: not any(map(is_healthy, fronts)))
    assert await asyncio.gather(*streams) == [expect(fronts[0], PROMPT, FINITE)] * 6
    await until(lambda: all(map(is_healthy, fronts)))
    for client in fronts:
        assert client.num_in_flight == 0
        assert client.stats[0].total_restarts == 1
        for engine in range(num_engines):
            seen = [totals for index, *totals in counts[client] if index == engine]
            assert seen == sorted(seen)
        assert sum(stats.total_generation_tokens for stats in client.stats.values()) >= 6 * 300
    assert main.supervisor.replicas[0].stats.total_restarts == 1
    # Two sockets of the owner and one for each front: those of the dead process are gone.
    await until(lambda: len(os.listdir(main.supervisor.folder.path)) == 4 * num_engines)


async def test_requests_of_all_fronts_survive_many_crashes(start_main, engines):
    recovery = RecoveryConfig(max_engine_restarts=100)
    main = await start_main("fake:step_s=0.002", num_engines=2, num_fronts=3, recovery=recovery)
    rng = random.Random(1)
    jobs = [
        ([i, *range(i % 40)], SamplingParams(max_tokens=1 + 17 * i % 300, seed=i, min_tokens=i % 3))
        for i in range(45)
    ]
    done = asyncio.gather(
        *(
            collect(main.fronts[i % 3 + 1], prompt, params, f"r{i // 3}")
            for i, (prompt, params) in enumerate(jobs)
        )
    )
    rng.choice(engines()).kill()
    assert await done == [expect(main.fronts[1], prompt, params) for prompt, params in jobs]


async def test_only_requests_that_ran_in_two_crashes_fail(start_main):
    """The engine names what it was running, whichever front it is from."""
    main = await start_main(f"fake:step_s=0.004,fail_on_token={BAD_TOKEN}", max_num_seqs=1)
    first, second = main.fronts.values()
    waiting = await start_streams(second, 1, FINITE)
    bad = asyncio.create_task(collect(first, [1, BAD_TOKEN]))
    waiting += [asyncio.create_task(collect(second, params=FINITE, request_id=i)) for i in "abc"]
    with pytest.raises(RequestFailedError, match=r"failed 2 times .*asked to fail"):
        await bad
    assert await asyncio.gather(*waiting) == [expect(second, PROMPT, FINITE)] * 4


async def test_a_silent_engine_gets_nothing_new_and_its_owner_kills_it(start_main, engines):
    main = await start_main(
        "fake:step_s=0.004", recovery=RecoveryConfig(engine_timeout=3), stuck_after_s=1
    )
    fronts = list(main.fronts.values())
    streams = [stream for client in fronts for stream in await start_streams(client, 2, FINITE)]
    (engine,) = engines()
    engine.suspend()
    await until(lambda: not any(map(is_healthy, fronts)))
    with pytest.raises(EngineDeadError, match=r"engine 0 .*is stuck"):
        await collect(fronts[0], request_id="new")
    assert await asyncio.gather(*streams) == [expect(fronts[0], PROMPT, FINITE)] * 4
    await until(lambda: all(map(is_healthy, fronts)))
    assert engine not in engines()


@pytest.fixture
def hold(factory, tmp_path):
    """The file that stops the engines of the factory ``HELD``."""
    return tmp_path / "hold"


async def test_a_front_knows_at_once_what_the_others_have_sent(start_main, factory, hold):
    main = await start_main(factory=factory(HELD))
    first, second = main.fronts.values()
    hold.touch()
    streams = [
        asyncio.create_task(collect(first, request_id=str(i), params=FINITE)) for i in range(3)
    ]
    # The engine has received one of them, and the step does not end.
    await until(lambda: main.replica(2).load.num_sent == 3)
    assert main.replica(1).load.num_sent == 3
    streams.append(asyncio.create_task(collect(second, request_id="0", params=FINITE)))
    await until(lambda: main.replica(1).load.num_sent == 4)
    assert main.replica(2).load.num_sent == 4
    late = await main.attach()
    await until(lambda: main.replica(3).load.num_sent == 4)
    hold.unlink()
    await asyncio.gather(*streams)
    await until(lambda: [main.replica(reader).load.score for reader in (1, 2, 3)] == [0, 0, 0])
    assert is_healthy(late)


async def test_an_engine_that_only_receives_is_stuck(start_main, factory, hold):
    """Its input thread tells each front of the requests of the others, and its steps do not end."""
    main = await start_main(factory=factory(HELD), stuck_after_s=1)
    first, second = main.fronts.values()
    hold.touch()
    (stream,) = [asyncio.create_task(collect(first, params=FINITE))]
    sender = main.replica(1)._sender
    sent = 0

    def is_stuck():
        nonlocal sent
        sender.send(Submit(f"more {sent}", [1], SamplingParams(max_tokens=1, seed=0)))
        sent += 1
        return not is_healthy(second)

    await until(is_stuck)
    assert main.replica(2).load.num_sent > 0
    hold.unlink()
    assert await stream == expect(first, PROMPT, FINITE)
    await until(lambda: is_healthy(second))


@pytest.mark.parametrize("seed", range(2))
async def test_placement_is_that_of_one_client_that_sees_everything(start_main, start, seed):
    """Both make the same loads, whichever of two equally loaded engines has which."""
    main = await start_main(SLOW, num_engines=2, max_num_seqs=2)
    alone = await start(SLOW, num_engines=2, max_num_seqs=2)
    rng = random.Random(seed)
    streams = {"fronts": [], "alone": []}

    def counts(client):
        return sorted((s.num_running, s.num_waiting) for s in client.stats.values())

    for i in range(9):
        front = main.fronts[rng.choice((1, 2))]
        for kind, client in (("fronts", front), ("alone", alone)):
            streams[kind].append(asyncio.create_task(collect(client, request_id=f"r{i}")))
        await until(
            lambda total=i + 1: all(
                sum(requests_held(client)) == total for client in (*main.fronts.values(), alone)
            )
        )
        await until(lambda: all(counts(c) == counts(alone) for c in main.fronts.values()))
        assert not any(main.replica(r, e).load.num_sent for r in (1, 2) for e in (0, 1))
    for stream in (*streams["fronts"], *streams["alone"]):
        stream.cancel()


async def test_fronts_begin_at_different_engines(start_main):
    main = await start_main(SLOW, num_engines=2, max_num_seqs=2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(client)) for client in main.fronts.values()]
        await until(lambda: requests_held(main.fronts[1]) == [1, 1])
        for task in tasks:
            task.cancel()


async def test_loads_are_exact_at_rest(start_main):
    main = await start_main(num_engines=2, num_fronts=3, max_num_seqs=4)
    params = [SamplingParams(max_tokens=1 + i % 7, seed=i) for i in range(60)]
    await asyncio.gather(
        *(
            collect(main.fronts[i % 3 + 1], params=p, request_id=str(i))
            for i, p in enumerate(params)
        )
    )
    replicas = [main.replica(reader, engine) for reader in (1, 2, 3) for engine in (0, 1)]
    await until(lambda: [replica.load.score for replica in replicas] == [0] * 6)
    sent = Counter()
    for replica in replicas:
        sent[replica.engine] += replica._num_handled
        assert replica._num_handled == replica._num_sent
    assert sum(sent.values()) == 60
    for replica in replicas:
        assert replica._others_handled == sent[replica.engine] - replica._num_sent


async def test_close_ends_the_requests_of_this_front_alone(start_main):
    main = await start_main(SLOW, num_engines=2)
    first, second = main.fronts.values()
    streams = await start_streams(first, 4)
    (kept,) = await start_streams(second, 1)
    await asyncio.gather(first.close(), first.close())
    for stream in streams:
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(first)
    with pytest.raises(EngineDeadError, match="shut down"):
        first.check_health()
    await until(lambda: sum(requests_held(second)) == 1)
    assert is_healthy(second)
    sockets = {f"{name}-{p}{r}" for p in (0, 1) for name, r in (("in", ""), ("out", "-0"))}
    sockets |= {"out-0-2", "out-1-2"}
    assert set(os.listdir(main.supervisor.folder.path)) == sockets
    kept.cancel()


async def test_drain_waits_for_the_requests_of_this_front(start_main):
    main = await start_main("fake:step_s=0.002")
    first, second = main.fronts.values()
    (endless,) = await start_streams(second, 1)
    streams = await start_streams(first, 3, FINITE)
    await first.drain(timeout_s=60)
    assert await asyncio.gather(*streams) == [expect(first, PROMPT, FINITE)] * 3
    assert second.num_in_flight == 1
    await second.drain(timeout_s=0.01)
    assert (await endless) != []


async def test_a_front_that_starts_later_learns_of_engines_that_are_down(start_main, engines):
    main = await start_main("fake:step_s=0.002", num_engines=2, num_fronts=1, recovery=NEVER)
    first = main.fronts[1]
    await asyncio.gather(*(collect(first, params=FINITE, request_id=i) for i in "ab"))
    engines()[0].kill()
    await until(lambda: not is_healthy(first))
    new = await main.attach()
    assert new.ready == first.ready
    assert new.stats[0].total_generation_tokens == first.stats[0].total_generation_tokens == 300
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        new.check_health()
    assert await collect(new, params=FINITE) == expect(new, PROMPT, FINITE)
    last = asyncio.create_task(collect(new))
    await until(lambda: new.num_in_flight == 1)
    engines()[0].kill()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await last
    assert "SIGKILL" in str(await new.gone)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await collect(first)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await main.attach()


async def test_a_front_waits_for_engines_that_have_not_started(start_main):
    main = await start_main(num_fronts=0)
    client = await main.attach()
    engines = client._engines
    assert is_healthy(client)
    other = type(engines)(main._config, reader=9)
    waiting = asyncio.create_task(other.all_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    (up,) = main.supervisor.state_for(9)
    other.handle(up)
    await waiting
    await other.stop(EngineDeadError("done"), timeout_s=5)


async def test_parked_requests_continue_once_the_engine_is_back(start_main, engines):
    main = await start_main(SLOW, num_fronts=0)
    client = await main.attach(waits_for_engines=True)
    (stream,) = await start_streams(client, 1, SamplingParams(max_tokens=50, seed=4))
    engines()[0].kill()
    await until(lambda: not is_healthy(client))
    params = SamplingParams(max_tokens=5, seed=3)
    assert await collect(client, params=params) == expect(client, PROMPT, params)
    assert len(await stream) == 50


async def test_a_front_that_cannot_receive_any_more_gives_up(start_main, monkeypatch, caplog):
    main = await start_main(SLOW)
    first, second = main.fronts.values()
    streams = [*await start_streams(first, 1), *await start_streams(second, 1)]

    def fail(_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(main.replica(1), "_handle", fail)
    with pytest.raises(EngineDeadError, match="a defect"):
        await streams[0]
    assert "a defect" in str(await first.gone)
    assert not second.gone.done()
    assert is_healthy(second)
    streams[1].cancel()

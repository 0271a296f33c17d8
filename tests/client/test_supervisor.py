"""Deaths of engines that come together, and starts that the system does not allow."""

import asyncio
import shutil
import signal
import tempfile

import pytest

from jaxserve.client import supervisor
from jaxserve.client.death import exited
from jaxserve.client.owned_engine import OwnedEngine
from jaxserve.config import RecoveryConfig
from jaxserve.errors import ConfigError, EngineDeadError, RequestFailedError
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.engine_calls import (
    PROMPT,
    TIMEOUT_S,
    collect,
    expect,
    is_healthy,
    start_streams,
)
from jaxserve.testing.waiting import until

FAKE = "fake:step_s=0.004"
FINITE = SamplingParams(max_tokens=300, seed=4)
MANY = RecoveryConfig(max_engine_restarts=100)
BAD_TOKEN = 77

# The fake engine, which ends without a word when a request has the bad token.
KILLED_BY_A_REQUEST = f"""
from jaxserve.testing import fake_engine, fake_runner
run = fake_runner.FakeRunner.execute
def execute(self, plan):
    if any({BAD_TOKEN} in s.known_token_ids for s in plan.scheduled):
        os._exit(9)
    return run(self, plan)
fake_runner.FakeRunner.execute = execute
return fake_engine.build(config, engine, on_progress)"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder in which this test makes its sockets."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_an_engine_restarts_although_the_folder_of_its_sockets_is_gone(
    start, engines, temporary
):
    client = await start(FAKE, num_engines=2)
    first, second = engines()
    (folder,) = temporary.iterdir()
    shutil.rmtree(folder)
    streams = await start_streams(client, 6, FINITE)
    first.kill()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 6
    await until(lambda: is_healthy(client) and first not in engines())
    assert second in engines()
    assert len(list(temporary.iterdir())) == 1
    await client.close()
    assert not list(temporary.iterdir())


async def test_a_start_that_fails_is_tried_again_and_hurts_no_other_engine(
    start, engines, temporary, caplog
):
    client = await start(FAKE, num_engines=2)
    first, second = engines()
    shutil.rmtree(temporary)
    first.kill()
    await until(lambda: "restart 2 of 5" in caplog.text)
    assert "set TMPDIR" in caplog.text
    assert await collect(client, params=FINITE) == expect(client, PROMPT, FINITE)
    assert engines() == [second]
    temporary.mkdir()
    await until(lambda: is_healthy(client))
    assert await collect(client, params=FINITE) == expect(client, PROMPT, FINITE)


async def test_without_room_for_sockets_the_start_fails_at_once(start, engines, monkeypatch):
    def somewhere_else(folder, process, reader=0):
        return f"ipc:///no/such/folder/out-{process}-{reader}"

    monkeypatch.setattr(supervisor.SocketFolder, "events", somewhere_else)
    with pytest.raises(ConfigError, match=r"in /no/such/folder: No such file.*TMPDIR"):
        async with asyncio.timeout(TIMEOUT_S):
            await start(FAKE, num_engines=2)


async def test_an_engine_without_room_for_its_socket_says_so(start, monkeypatch, capfd, caplog):
    monkeypatch.setattr(
        supervisor.SocketFolder, "requests", lambda folder, process: "ipc:///no/such/folder/in"
    )
    with pytest.raises(ConfigError, match=r"in /no/such/folder: No such file.*TMPDIR"):
        await start(FAKE)
    assert "Traceback" not in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(
    ("number", "words"), [(9, "SIGKILL .*memory"), (11, "SIGSEGV$"), (40, "signal 40$")]
)
def test_a_death_names_every_signal(number, words):
    with pytest.raises(EngineDeadError, match=f"engine 0 was killed by {words}"):
        raise exited("engine 0", -number).error


async def test_a_real_time_signal_kills_an_engine_like_any_other(start, engines, caplog):
    client = await start(FAKE)
    (engine,) = engines()
    streams = await start_streams(client, 2, FINITE)
    engine.send_signal(signal.SIGRTMIN + 6)
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 2
    assert "was killed by signal" in caplog.text


@pytest.mark.parametrize("watch", ["_watch_process", "_watch_silence"])
async def test_an_engine_that_nobody_can_watch_counts_as_dead(
    start, engines, monkeypatch, caplog, watch
):
    client = await start(FAKE)
    (engine,) = engines()
    fail = asyncio.Event()

    async def fails(_):
        await fail.wait()
        raise ZeroDivisionError("no watch")

    with monkeypatch.context() as context:
        context.setattr(OwnedEngine, watch, fails)
        engine.kill()  # its successor is watched by the broken watch
        await until(lambda: not is_healthy(client))
        await until(lambda: is_healthy(client))
    (engine,) = engines()
    streams = await start_streams(client, 2, FINITE)
    fail.set()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 2
    assert engine not in engines()
    assert f"the supervision of engine 0 (pid {engine.pid}) failed: no watch" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_engines_that_die_together_fail_no_request(start, engines, how):
    recovery = RecoveryConfig(engine_timeout=6, max_engine_restarts=100)
    client = await start(FAKE, num_engines=2, recovery=recovery)
    streams = await start_streams(client, 6, FINITE)
    first, second = engines()
    if how == "stopped":
        first.suspend()
        await until(lambda: first.status() == "stopped")
    else:
        first.kill()
    second.kill()
    assert await asyncio.gather(*streams) == [expect(client, PROMPT, FINITE)] * 6


async def test_a_request_that_kills_its_engine_without_a_word_fails(start, factory):
    client = await start(
        FAKE,
        num_engines=2,
        factory=factory(KILLED_BY_A_REQUEST),
        recovery=MANY,
        waits_for_engines=True,
    )
    with pytest.raises(RequestFailedError, match="failed 2 times"):
        await collect(client, [1, BAD_TOKEN], request_id="bad")
    # A request that came when both engines were dead waits for one.
    assert await collect(client, params=FINITE) == expect(client, PROMPT, FINITE)

"""The start of engine processes: progress, failures and logs."""

import asyncio
import re
from pathlib import Path

import pytest

from jaxserve.client import launcher
from jaxserve.errors import ConfigError, EngineDeadError, JaxserveError
from jaxserve.ipc.messages import Progress


async def test_a_user_error_at_the_start_keeps_its_type(start, caplog):
    with pytest.raises(ConfigError, match="fake:bogus=1"):
        await start("fake:bogus=1", num_engines=2)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("num_engines", [0, -1])
async def test_a_client_without_engines_does_not_start(start, num_engines):
    with pytest.raises(ConfigError, match=f"--data-parallel-size.*at least 1.*{num_engines}"):
        await start(num_engines=num_engines)


async def test_an_unlisted_error_arrives_as_its_base_class(start, factory):
    body = "from jaxserve.errors import UnknownModelError\nraise UnknownModelError('m', ('a',))"
    with pytest.raises(JaxserveError, match="Models served here: a") as caught:
        await start(factory=factory(body))
    assert type(caught.value) is JaxserveError


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no such luck')", "engine 0 failed: ValueError: no such luck"),
        ("os._exit(7)", r"engine 0 \(pid \d+\) ended with exit code 7"),
        ("os.kill(os.getpid(), 11)", r"engine 0 \(pid \d+\) was killed by SIGSEGV"),
        ("if engine == 0: os._exit(9)\ntime.sleep(60)", "exit code 9"),
    ],
)
async def test_an_engine_that_dies_while_it_starts_fails_the_start(
    start, factory, body, message, engines
):
    num_engines = 2 if "engine == 0" in body else 1
    with pytest.raises(EngineDeadError, match=message):
        await start(num_engines=num_engines, factory=factory(body))
    assert engines() == []


async def test_rejects_more_engines_than_devices(start, monkeypatch):
    monkeypatch.setattr(launcher, "NVIDIA_DRIVER", Path(__file__))  # as if there were GPUs
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="need 2 GPUs, but CUDA_VISIBLE_DEVICES has 1"):
        await start(num_engines=2)


async def test_a_missing_factory_is_an_error(start):
    with pytest.raises(EngineDeadError, match="ModuleNotFoundError: No module named 'nowhere'"):
        await start(factory="nowhere:build")


async def test_a_cancelled_start_leaves_no_process(start, factory, engines):
    loading = asyncio.Event()
    body = (
        "from jaxserve.ipc.messages import Progress\n"
        "on_progress(Progress(engine, 'load', 0, 1, 'GB'))\n"
        "time.sleep(60)"
    )
    starting = asyncio.create_task(
        start(num_engines=2, factory=factory(body), on_progress=lambda _: loading.set())
    )
    async with asyncio.timeout(60):  # only a defect takes this long
        await loading.wait()
    assert len(engines()) == 2
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engines() == []


async def test_progress_is_reported(start):
    reports = []
    client = await start(num_engines=2, on_progress=reports.append)
    assert all(isinstance(report, Progress) for report in reports)
    assert {report.engine for report in reports} == {0, 1}
    assert {report.phase for report in reports} == {"load weights", "compile"}
    assert client.ready == client.engines[0]
    assert [ready.engine for ready in client.engines.values()] == [0, 1]


@pytest.mark.parametrize(
    ("level", "shown"), [("DEBUG", ["debug", "info", "error"]), ("ERROR", ["error"])]
)
async def test_an_engine_logs_from_the_level_of_the_front(
    start, factory, capfd, caplog, level, shown
):
    body = """
import logging
from jaxserve.errors import ConfigError
for level in ("debug", "info", "error"):
    getattr(logging.getLogger("jaxserve.engine"), level)(f"<{level}>")
    getattr(logging.getLogger("another.library"), level)(f"[{level}]")
raise ConfigError("the end")"""
    caplog.set_level(level, "jaxserve.client.supervisor")
    with pytest.raises(ConfigError, match="the end"):
        await start(factory=factory(body))
    logged = capfd.readouterr().err
    assert re.findall(r"<(\w+)>", logged) == shown
    assert re.findall(r"\[(\w+)\]", logged) == ["error"]

"""Child processes: their settings, their module path and their end."""

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from jaxserve.ipc import child_process
from jaxserve.ipc.child_process import ChildProcess, module_path

CHILD = """
import time
import msgspec
from jaxserve.ipc.parent import begin_child_process

class Settings(msgspec.Struct):
    text: str

print(begin_child_process(Settings).text, flush=True)
time.sleep(600)
"""


class Settings(msgspec.Struct):
    text: str


def start(**options) -> ChildProcess:
    return ChildProcess(
        "a_child", Settings("the settings"), name="a child", environment=os.environ, **options
    )


@pytest.fixture
async def process(tmp_path, monkeypatch):
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = start()
    yield process
    await process.stop(timeout_s=0)


def test_a_child_has_the_module_path_of_its_parent():
    assert module_path(["", "/a", "/b"]).split(os.pathsep) == [os.getcwd(), "/a", "/b"]


async def test_a_child_gets_its_settings_and_prints_to_standard_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "a_child.py").write_text(CHILD.replace("time.sleep(600)", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await start().wait() == 0
    assert capfd.readouterr().err == "the settings\n"


async def test_wait_returns_the_exit_code(process):
    assert process.is_running
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.gather(process.wait(), process.wait()) == [-signal.SIGKILL] * 2
    assert not process.is_running
    assert await process.stop(timeout_s=0) == -signal.SIGKILL


async def test_a_process_exits_when_its_stdin_closes(process):
    process.close_stdin()
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_stop_kills_a_process_that_cannot_exit(process, monkeypatch):
    monkeypatch.setattr(child_process, "STDIN_CLOSED_TIMEOUT_S", 0.05)
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.stop(timeout_s=0.05) == -signal.SIGKILL


async def test_the_launch_of_a_child_that_dies_at_once_succeeds(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert await start().wait() == 1


async def test_cancelling_a_wait_does_not_affect_other_waits(process):
    first, second = (asyncio.create_task(process.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    process.close_stdin()
    assert await second == 0
    assert first.cancelled()

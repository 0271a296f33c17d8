"""Engine process: its exit with the front, signals, output and failures."""

import contextlib
import os
import select
import signal
import subprocess
import sys

import psutil
import pytest

from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig
from jaxserve.engine.process import failure
from jaxserve.errors import CheckpointError, EngineDeadError
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.waiting import wait_until

FAKE = "jaxserve.testing.fake_engine:build"


def test_failure_tells_user_errors_from_internal_errors():
    event = failure(2, CheckpointError("no such file: x"), ())
    assert (event.engine, event.message) == (2, "no such file: x")
    assert (event.is_user_error, event.error_type) == (True, "CheckpointError")
    event = failure(0, ZeroDivisionError("by zero"), ("a", "b"))
    assert event.running_ids == ("a", "b")
    assert (event.message, event.is_user_error) == ("ZeroDivisionError: by zero", False)
    assert "ZeroDivisionError: by zero" in event.traceback


FRONT = """
import asyncio, sys
from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig, ModelConfig, ParallelConfig
from jaxserve.errors import JaxserveError

async def main(factory, model):
    config = EngineConfig(
        model=ModelConfig(model=model), parallel=ParallelConfig(data_parallel_size=2)
    )
    try:
        client = await EngineClient.start(config, factory=factory)
    except JaxserveError as error:
        sys.exit(str(error))
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def start_front(tmp_path, *, factory=FAKE, model="fake"):
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    return subprocess.Popen(
        [sys.executable, script, factory, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "TMPDIR": str(tmp_path),  # for the sockets of a front that is killed
        },
        text=True,
    )


@pytest.fixture
def front(tmp_path):
    """Starts a front with two engines and returns both; kills them at the end."""
    with start_front(tmp_path) as front:
        assert front.stdout.readline() == "ready\n"
        pids = [child.pid for child in psutil.Process(front.pid).children()]
        assert len(pids) == 2
        # Unlike a process ID, a pidfd is never reused for another process.
        engines = {pid: os.pidfd_open(pid) for pid in pids}
        yield front, engines
        front.kill()
    for engine in engines.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
        os.close(engine)


def assert_engines_exit(engines):
    for pid, engine in engines.items():
        assert select.select([engine], [], [], 20)[0], f"engine {pid} outlived its front"


def test_no_engine_outlives_a_killed_front(front):
    front, engines = front
    # A stopped process cannot notice that its input has ended.
    stopped = psutil.Process(next(iter(engines)))
    stopped.suspend()
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    front.kill()
    assert_engines_exit(engines)


def test_an_interrupt_reaches_only_the_front(front):
    front, engines = front
    assert len({os.getpgid(pid) for pid in (front.pid, *engines)}) == 3
    front.send_signal(signal.SIGINT)
    _, stderr = front.communicate(timeout=60)
    assert stderr.endswith("KeyboardInterrupt\n")
    assert "engine/process.py" not in stderr
    assert_engines_exit(engines)


def test_a_user_error_is_one_line(tmp_path):
    with start_front(tmp_path, model="fake:bogus=1") as front:
        stdout, stderr = front.communicate(timeout=60)
    assert front.returncode == 1
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert "fake:bogus=1" in stderr


def test_an_internal_error_prints_a_traceback_and_repeats_its_last_line(tmp_path):
    factory = "def build(*args):\n    raise OSError('the disk is on fire')\n"
    (tmp_path / "burning.py").write_text(factory)
    with start_front(tmp_path, factory="burning:build") as front:
        _, stderr = front.communicate(timeout=60)
    assert "burning.py" in stderr
    lines = stderr.splitlines()
    assert lines[-1].endswith("failed: OSError: the disk is on fire")
    assert lines[-1].startswith("engine ")


def test_standard_output_of_an_engine_goes_to_standard_error(tmp_path):
    (tmp_path / "talking.py").write_text(
        "import os\n"
        "def build(*args):\n    os.write(1, b'a line of a library\\n')\n    raise SystemExit(3)\n"
    )
    with start_front(tmp_path, factory="talking:build") as front:
        stdout, stderr = front.communicate(timeout=60)
    assert stdout == ""
    assert "a line of a library" in stderr.splitlines()
    assert "exit code 3" in stderr.splitlines()[-1]


@pytest.fixture
async def client():
    client = await EngineClient.start(EngineConfig(), factory=FAKE)
    yield client
    await client.close()


IDLE_FRONT = """
import asyncio, psutil, time
from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig

async def main():
    client = await EngineClient.start(EngineConfig(), factory="jaxserve.testing.fake_engine:build")
    processes = [psutil.Process(), *psutil.Process().children()]
    used = lambda: sum(sum(p.cpu_times()[:2]) for p in processes)
    events = asyncio.Queue()
    client.on_outputs = events.put_nowait
    await events.get()
    start_s, before = time.monotonic(), used()
    while time.monotonic() < start_s + 1.9:
        await events.get()
    print(used() - before)
    await client.close()

asyncio.run(main())
"""


def test_an_idle_engine_and_its_front_use_no_cpu():
    # In its own process, so that all threads of a front count, and threads of other tests do not.
    done = subprocess.run(
        [sys.executable, "-c", IDLE_FRONT], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) < 0.1


async def test_an_engine_ignores_sigint_and_sigterm(client):
    (engine,) = [c for c in psutil.Process().children() if "jaxserve.engine.process" in c.cmdline()]
    for _ in range(2):
        engine.send_signal(signal.SIGINT)
        engine.send_signal(signal.SIGTERM)
    params = SamplingParams(max_tokens=5, seed=0)
    outputs = client.generate(Submit("a", [1], params))
    tokens = [token async for output in outputs for token in output.token_ids]
    assert tokens == expected_tokens([1], params, FakeModel(), context_length=1024)
    client.check_health()


async def test_an_engine_that_cannot_send_exits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jaxserve.client.owned_engine.EXIT_REASON_TIMEOUT_S", 0.01)
    (tmp_path / "odd.py").write_text(
        "import time\ndef build(config, engine, on_progress):\n"
        "    on_progress(object())\n    time.sleep(60)\n"
    )
    with pytest.raises(EngineDeadError, match="exit code 1"):
        await EngineClient.start(EngineConfig(), factory="odd:build")

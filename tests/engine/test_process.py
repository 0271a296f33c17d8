"""Engine process: its loop, its exit with the front, signals and failures."""

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jaxserve.client.engine_client import EngineClient
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import process
from jaxserve.engine.process import EngineLoop, failure
from jaxserve.errors import CheckpointError, EngineDeadError
from jaxserve.ipc.messages import Abort, FinishReason, Shutdown, StepStats, Submit
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_runner import FakeModel, expected_tokens

FAKE = "jaxserve.testing.fake_engine:build"


def submit(request_id, max_tokens=5):
    return Submit(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=0))


class Front:
    """Runs an engine loop in this thread, records its events, and sends messages in reply.

    ``replies``: pairs of a condition on an event and the messages to send when it first holds.
    """

    def __init__(self, *requests, replies=(), model="fake"):
        self.events = []
        self._inbox = queue.SimpleQueue()
        self._replies = list(replies)
        for request in requests:
            self._inbox.put(request)
        config = EngineConfig(model=ModelConfig(model=model))
        core = fake_engine.build(config, 4, lambda _: None).core
        EngineLoop(4, core, self._inbox, self._receive).run()

    def _receive(self, event):
        self.events.append(event)
        if self._replies and self._replies[0][0](event):
            for request in self._replies.pop(0)[1]:
                self._inbox.put(request)

    def tokens(self, request_id):
        outputs = [o for event in self.events for o in event.outputs if o.request_id == request_id]
        return [token for output in outputs for token in output.token_ids]


def finishes(request_id):
    return lambda event: any(
        o.request_id == request_id and o.finish_reason is not None for o in event.outputs
    )


def is_idle(event):
    return event.stats.num_running + event.stats.num_waiting == 0


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.001)


def test_loop_runs_requests_until_shutdown():
    front = Front(submit("a", 5), submit("b", 9), replies=[(finishes("b"), [Shutdown()])])
    for request_id, max_tokens in (("a", 5), ("b", 9)):
        expected = expected_tokens(
            [1, 2, 3], submit("", max_tokens).params, FakeModel(), context_length=1024
        )
        assert front.tokens(request_id) == expected
    assert {event.engine for event in front.events} == {4}


def test_loop_handles_messages_in_order():
    # Only the second "a" may run: the abort belongs to the first.
    front = Front(
        submit("a", 100),
        Abort(["a", "unknown"]),
        submit("a", 3),
        replies=[(finishes("a"), [Shutdown()])],
    )
    assert len(front.tokens("a")) == 3


def test_loop_aborts_before_the_next_step():
    front = Front(
        submit("a", 900),
        replies=[(lambda e: e.outputs, [Abort(["a"])]), (is_idle, [Shutdown()])],
    )
    # One step was in flight, and a second may have been started before the abort was seen.
    assert len(front.tokens("a")) <= 3
    assert front.events[-1].stats.kv_usage == 0


def test_loop_sends_an_event_when_an_abort_leaves_the_engine_idle(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_S", 3600)
    replies = [(lambda e: e.outputs, [Abort(["a"])]), (is_idle, [Shutdown()])]
    assert Front(submit("a", 900), replies=replies).events[-1].stats.num_running == 0


def test_shutdown_ends_the_loop_while_a_request_is_running():
    front = Front(submit("a", 900), replies=[(lambda e: e.outputs, [Shutdown()])])
    assert 0 < len(front.tokens("a")) < 5


def test_idle_loop_sends_heartbeats():
    beats = []

    def is_third(event):
        beats.append(event)
        return len(beats) == 3

    front = Front(replies=[(is_third, [Shutdown()])])
    assert [(event.outputs, is_idle(event)) for event in front.events] == [([], True)] * 3


def test_stats_include_requests_that_arrived_during_the_step():
    inbox, events = queue.SimpleQueue(), []

    class Core:
        has_work = True
        added = ()

        def add(self, submit):
            self.added = (*self.added, submit.request_id)

        def step(self, now):
            inbox.put(submit(f"a{len(events)}"))
            return []

        def stats(self):
            return StepStats(num_waiting=len(self.added))

    def receive(event):
        events.append(event)
        if len(events) == 3:
            inbox.put(Shutdown())

    EngineLoop(0, Core(), inbox, receive).run()
    assert [event.stats.num_waiting for event in events] == [1, 2, 3]


def test_a_request_that_cannot_be_served_ends_with_an_error():
    too_long = Submit("a", [1] * 5000, SamplingParams(seed=0))
    front = Front(too_long, submit("b"), replies=[(finishes("b"), [Shutdown()])])
    outputs = [o for event in front.events for o in event.outputs if o.request_id == "a"]
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert len(front.tokens("b")) == 5


def test_a_failing_step_ends_the_loop():
    with pytest.raises(RuntimeError, match="asked to fail"):
        Front(submit("a"), model="fake:fail_on_step=2")


def test_failure_tells_user_errors_from_internal_errors():
    event = failure(2, CheckpointError("no such file: x"))
    assert (event.engine, event.message) == (2, "no such file: x")
    assert (event.is_user_error, event.error_type) == (True, "CheckpointError")
    event = failure(0, ZeroDivisionError("by zero"))
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
    while stopped.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
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
        [sys.executable, "-c", IDLE_FRONT], capture_output=True, text=True, check=True
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
    monkeypatch.setattr("jaxserve.client.engine_client.EXIT_REASON_TIMEOUT_S", 0.01)
    (tmp_path / "odd.py").write_text(
        "import time\ndef build(config, engine, on_progress):\n"
        "    on_progress(object())\n    time.sleep(60)\n"
    )
    with pytest.raises(EngineDeadError, match="exit code 1"):
        await EngineClient.start(EngineConfig(), factory="odd:build")

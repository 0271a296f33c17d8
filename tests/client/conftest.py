"""Clients of fake engines in processes of their own."""

import contextlib

import msgspec
import psutil
import pytest

from jaxserve.client.attached import AttachedEngines
from jaxserve.client.engine_client import EngineClient
from jaxserve.client.engines import Callbacks
from jaxserve.client.supervisor import Supervisor
from jaxserve.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from jaxserve.errors import EngineDeadError
from jaxserve.ipc.control import EngineDown, EnginesGone, EngineUp

FAKE = "jaxserve.testing.fake_engine:build"


@pytest.fixture
def engines():
    """``engines()`` returns the running processes that this test started, oldest first.

    None may be left after the test.
    """
    before = set(psutil.Process().children())

    def engines():
        children = [child for child in psutil.Process().children() if child not in before]
        return sorted(children, key=lambda child: child.pid)

    yield engines
    assert engines() == []


def config_of(model="fake", *, num_engines=1, max_num_seqs=None, recovery=None):
    return EngineConfig(
        model=ModelConfig(model=model),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        parallel=ParallelConfig(data_parallel_size=num_engines),
        recovery=recovery or RecoveryConfig(),
    )


@pytest.fixture
async def start(engines):
    """Starts clients of engines, fake ones by default, and closes them after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            model="fake",
            *,
            num_engines=1,
            max_num_seqs=None,
            factory=FAKE,
            recovery=None,
            **options,
        ):
            config = config_of(
                model, num_engines=num_engines, max_num_seqs=max_num_seqs, recovery=recovery
            )
            client = await EngineClient.start(config, factory=factory, **options)
            stack.push_async_callback(client.close)
            return client

        yield start


class MainProcess:
    """A supervisor, and fronts in this process that get its messages.

    Attributes:
      supervisor: runs the engines.
      fronts: the clients by their number as a reader.
    """

    def __init__(self, config, factory, options):
        self.supervisor = Supervisor(config, factory, **options)
        self.supervisor.watch(Callbacks(ready=self._on_ready, death=self._on_death))
        self.supervisor.gone.add_done_callback(
            lambda gone: self._tell_all(EnginesGone(str(gone.result())))
        )
        self.fronts = {}
        self._config = config
        self._options = options
        self._attached = {}

    async def attach(self, *, all_ready=True, **options):
        """Returns the client of a new front."""
        reader = len(self.fronts) + 1
        engines = AttachedEngines(self._config, reader=reader, **self._options)
        client = self.fronts[reader] = EngineClient(engines, self._config, **options)
        for message in self.supervisor.state_for(reader):
            self._tell(engines, message)
        self._attached[reader] = engines
        if all_ready:
            await engines.all_ready()
        return client

    def replica(self, reader, engine=0):
        return self._attached[reader].replicas[engine]

    async def close(self):
        for client in self.fronts.values():
            await client.close()
        await self.supervisor.stop(EngineDeadError("the test has ended"), timeout_s=5)

    def _on_ready(self, replica):
        for reader, engines in self._attached.items():
            self._tell(engines, self.supervisor.engine_up(replica, reader))

    def _on_death(self, replica):
        self._tell_all(self.supervisor.engine_down(replica))

    def _tell_all(self, message):
        for engines in self._attached.values():
            self._tell(engines, message)

    def _tell(self, engines, message):
        data = msgspec.msgpack.encode(message)
        engines.handle(msgspec.msgpack.decode(data, type=EngineUp | EngineDown | EnginesGone))


@pytest.fixture
async def start_main(engines):
    """Starts main processes with fronts, and ends them after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_main(
            model="fake",
            *,
            num_fronts=2,
            num_engines=1,
            max_num_seqs=None,
            factory=FAKE,
            recovery=None,
            **options,
        ):
            config = config_of(
                model, num_engines=num_engines, max_num_seqs=max_num_seqs, recovery=recovery
            )
            main = MainProcess(config, factory, options)
            stack.push_async_callback(main.close)
            await main.supervisor.start()
            for _ in range(num_fronts):
                await main.attach()
            return main

        yield start_main


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Returns the name of a new factory with the given body."""
    monkeypatch.syspath_prepend(tmp_path)

    def factory(body):
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        source = f"import os, time\ndef build(config, engine, on_progress):\n{lines}\n"
        (tmp_path / "a_factory.py").write_text(source)
        return "a_factory:build"

    return factory

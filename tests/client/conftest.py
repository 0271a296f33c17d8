"""Clients of fake engines in processes of their own."""

import contextlib

import psutil
import pytest

from jaxserve.client.engine_client import EngineClient
from jaxserve.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)

FAKE = "jaxserve.testing.fake_engine:build"


@pytest.fixture
def engines():
    """``engines()`` returns the running processes that this test started, oldest first."""
    before = set(psutil.Process().children())

    def engines():
        children = [child for child in psutil.Process().children() if child not in before]
        return sorted(children, key=lambda child: child.pid)

    return engines


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
            config = EngineConfig(
                model=ModelConfig(model=model),
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
                parallel=ParallelConfig(data_parallel_size=num_engines),
                recovery=recovery or RecoveryConfig(),
            )
            client = await EngineClient.start(config, factory=factory, **options)
            stack.push_async_callback(client.close)
            return client

        yield start
    assert engines() == []


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

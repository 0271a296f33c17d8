"""Servers in their own processes, and openai clients for them."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.server_process import ServerProcess
from jaxserve.testing.tiny import write_checkpoint
from jaxserve.testing.waiting import until

# Few programs to compile, and fewer blocks than 8 long requests need.
SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_blocks": 24,
}


@dataclass(frozen=True)
class Server:
    """A server that is ready for requests."""

    process: ServerProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """Returns the value of the only sample named ``vllm:`` + name that has these labels."""
        text = httpx.get(f"{self.url}/metrics").text
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        ]
        return value

    async def until_idle(self) -> None:
        """Waits until no request is in flight and no block is in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        await until(lambda: not any(self.metric(name, engine="0") for name in names))


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of all engines in this folder, which share compiled programs."""
    return {**SETTINGS, "compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}


@pytest.fixture(scope="session")
def flags(settings: dict[str, Any]) -> list[str]:
    """The settings as flags of the command line."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items()]
    return list(itertools.chain.from_iterable(pairs))


@pytest.fixture(scope="session")
def serve(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """``with serve(model, *more_flags) as server`` runs a server until the end of the block."""
    log = tmp_path_factory.mktemp("server") / "log"

    @contextlib.contextmanager
    def serve(model: str | Path, *more_flags: str) -> Iterator[Server]:
        with ServerProcess(["--model", str(model), *flags, *more_flags], log=log) as process:
            asyncio.run(process.until_healthy())
            yield Server(process)

    return serve


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a context of 256 tokens."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")

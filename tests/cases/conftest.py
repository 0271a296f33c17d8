"""Failures that other servers have had, each of which must not happen here.

How a case is written: the ids are in ids.txt, and each has at least one test whose name begins with
it, ``test_js_022_...``, in the file of its section. A test asks for a checkpoint and serves it:

    rand                    a random Llama whose 512 ids are all tokens, for whatever depends on
                            attention, the KV cache or numbers
    script(name=[pieces])   a model that answers a prompt ending in ``<name>`` with these pieces
                            (`jaxserve.testing.scripted_checkpoint`). Tests that need several
                            scripts should ask for them at once.
    serve(path, **flags)    an `ApiClient` of a real server in threads of this process; ``flags``
                            are those of ``python -m server``. The same path and flags give the
                            same server, until the end of the session.
    serve_process(...)      the same as processes of their own, for what ends or breaks them

Few different flags mean few programs to compile. A server that a test leaves broken must be its
own: give it a checkpoint of its own. After a refusal `ApiClient.refused` sends a good request.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.bench.server_process import ServerProcess
from jaxserve.client.protocol import Engine
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.testing.api_client import ApiClient
from jaxserve.testing.scripted_checkpoint import write_scripted
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from server.testing import ServerThread, flags

SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 65,
    "warmup": False,
}


class Server(ApiClient):
    """A client of a server in this process, and the server's own front end."""

    def __init__(self, thread: ServerThread) -> None:
        super().__init__(thread.url)
        self.thread = thread
        self.text_engine = thread.text_engine
        self.tokenizer = thread.text_engine.model.tokenizer

    def is_idle(self) -> bool:
        """Whether no request is on board."""
        stats = self.text_engine.engine.stats.values()
        return not (
            self.text_engine.num_in_flight or any(s.num_running + s.num_waiting for s in stats)
        )

    def one_token_at_a_time(self) -> "Server":
        """Has the front get every token by itself. Tokens that it is too slow for are merged."""
        if not isinstance(self.text_engine.engine, OneByOne):
            self.text_engine.engine = OneByOne(self.text_engine.engine)
        return self


class OneByOne:
    """An engine whose outputs have one token each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                last = max(len(output.token_ids) - 1, 0)
                for i in range(last + 1):
                    yield msgspec.structs.replace(
                        output,
                        token_ids=output.token_ids[i : i + 1],
                        logprobs=output.logprobs and output.logprobs[i : i + 1],
                        prompt_logprobs=output.prompt_logprobs if i == 0 else None,
                        finish_reason=output.finish_reason if i == last else None,
                        stop_reason=output.stop_reason if i == last else None,
                    )


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all servers here have in common. They share their compiled programs."""
    return {**SETTINGS, "compilation_cache_dir": tmp_path_factory.mktemp("compiled")}


@pytest.fixture(scope="session")
def serve(settings: dict[str, Any]) -> Iterator[Callable[..., Server]]:
    """Serves a checkpoint; see the top of this file."""
    servers: dict[tuple[Any, ...], Server] = {}

    def serve(path: Path, **more: Any) -> Server:
        key = (path, *sorted(more.items()))
        if key not in servers:
            argv = flags(model=path, **{**settings, **more})
            servers[key] = Server(ServerThread(*argv))
        return servers[key]

    yield serve
    for server in servers.values():
        server.until(server.is_idle)  # nothing that a test has left behind runs on
        server.close()
        server.thread.close()


@pytest.fixture(scope="session")
def serve_process(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[ApiClient]]:
    """``with serve_process(path, **flags) as client``; the process is ``client.process``."""

    @contextlib.contextmanager
    def serve_process(path: Path, **more: Any) -> Iterator[ApiClient]:
        argv = flags(model=path, **{**settings, **more})
        log = tmp_path_factory.mktemp("server") / "log"
        with ServerProcess(argv, log=log) as process:
            asyncio.run(process.until_healthy())
            client = ApiClient(f"http://127.0.0.1:{process.port}")
            client.process = process
            try:
                yield client
            finally:
                client.close()

    return serve_process


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a context of 256 tokens; no BOS before a text."""
    folder = tmp_path_factory.mktemp("rand") / "rand"
    config = tiny_config()
    return write_checkpoint(folder, config, tokenizer=full_backend(config["vocab_size"]))


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a scripted checkpoint; the same arguments give the same one."""
    folders: dict[str, Path] = {}

    def script(*, options: dict[str, Any] | None = None, **scripts: Any) -> Path:
        key = repr((scripts, options))
        if key not in folders:
            folder = tmp_path_factory.mktemp("script") / "script"
            folders[key] = write_scripted(folder, scripts, **(options or {}))
        return folders[key]

    return script

"""Regression tests for failures of other servers, and the fixtures that serve models to them.

The case IDs are in ids.txt. Each case has at least one test, whose name begins with its ID:
``test_js_022_...``. Fixtures:

    random_checkpoint       a random Llama whose 512 IDs are all tokens, for tests that depend on
                            attention, the KV cache or numbers
    scripted_checkpoint(name=[pieces])
                            writes a model that continues a prompt ending in ``<name>`` with these
                            pieces (`jaxserve.testing.scripted_checkpoint`). A test that needs
                            several scripts should put them in one checkpoint.
    serve(path, **flags)    an `ApiClient` of a real server in threads of this process; ``flags``
                            are those of ``python -m server``. The same path and flags return the
                            same server until the end of the session.
    serve_process(...)      the same in processes of its own, for tests that stop or break a server

Fewer distinct flags mean fewer programs to compile. A test that leaves its server broken must use a
checkpoint of its own. After each refusal, `ApiClient.refused` checks that a good request succeeds.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.bench.server_process import ServerProcess
from jaxserve.client.protocol import Engine
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.testing.api_client import CHAT, ApiClient
from jaxserve.testing.scripted_checkpoint import write_scripted
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.testing.waiting import wait_until
from jaxserve.text.template_files import ChatTemplates
from server.testing import ServerThread, flags

SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 65,
    "warmup": False,
}


class Server(ApiClient):
    """A client of a server in this process, with access to the front of that server."""

    def __init__(self, thread: ServerThread) -> None:
        super().__init__(thread.url)
        self.thread = thread
        self.text_engine = thread.text_engine
        self.tokenizer = thread.text_engine.model.tokenizer

    def shown(self, path: str, body: dict[str, Any]) -> str:
        """Returns the prompt of a request that succeeds, as the model sees it."""
        prompts: list[list[int]] = []
        engine = self.text_engine.engine
        generate = engine.generate

        def keep(submit: Submit, **options: Any) -> AsyncGenerator[RequestOutput, None]:
            prompts.append(submit.prompt_token_ids)
            return generate(submit, **options)

        engine.generate = keep  # type: ignore[method-assign]
        try:
            reply = self.post(path, body)
        finally:
            del engine.generate
        assert reply.status_code == 200, reply.text
        return self.tokenizer.decode(prompts[0], skip_special_tokens=False)

    def shown_chat(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Returns the prompt of a chat."""
        return self.shown(CHAT, {"messages": messages, "max_tokens": 1, **more})

    def shown_input(self, items: list[dict[str, Any]], **more: Any) -> str:
        """Returns the prompt of a response."""
        return self.shown("/v1/responses", {"input": items, "max_output_tokens": 1, **more})

    def is_idle(self) -> bool:
        """Returns whether no request is in flight."""
        stats = self.text_engine.engine.stats.values()
        return not (
            self.text_engine.num_in_flight or any(s.num_running + s.num_waiting for s in stats)
        )

    def with_one_token_per_output(self) -> "Server":
        """Sends each token to the front in its own output; waiting tokens are otherwise merged."""
        if not isinstance(self.text_engine.engine, OneTokenPerOutput):
            self.text_engine.engine = OneTokenPerOutput(self.text_engine.engine)
        return self


class OneTokenPerOutput:
    """An engine that splits its outputs into outputs of one token."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(
            self._engine.generate(request, on_ended=on_ended)
        ) as outputs:
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
    """The flags that all servers of this folder share, including a folder for programs."""
    return {**SETTINGS, "compilation_cache_dir": tmp_path_factory.mktemp("compiled")}


@pytest.fixture(scope="session")
def serve(settings: dict[str, Any]) -> Iterator[Callable[..., Server]]:
    """``serve(path, **flags)`` returns a `Server`; see the docstring of this module."""
    servers: dict[tuple[Any, ...], Server] = {}

    def serve(path: Path, **more_flags: Any) -> Server:
        key = (path, *sorted(more_flags.items()))
        if key not in servers:
            argv = flags(model=path, **{**settings, **more_flags})
            servers[key] = Server(ServerThread(*argv))
        return servers[key]

    yield serve
    for server in servers.values():
        wait_until(server.is_idle)  # the requests that a test abandoned have ended
        server.close()
        server.thread.close()


@pytest.fixture(scope="session")
def serve_process(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[ApiClient]]:
    """``with serve_process(path, **flags) as client``; ``client.process`` is the server."""

    @contextlib.contextmanager
    def serve_process(path: Path, **more_flags: Any) -> Iterator[ApiClient]:
        argv = flags(model=path, **{**settings, **more_flags})
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
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a context of 256 tokens; prompts get no BOS token."""
    folder = tmp_path_factory.mktemp("rand") / "rand"
    config = tiny_config()
    return write_checkpoint(folder, config, tokenizer=full_backend(config["vocab_size"]))


@pytest.fixture(scope="session")
def scripted_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``scripted_checkpoint(name=[pieces])`` writes a checkpoint, once for the same arguments."""
    folders: dict[str, Path] = {}

    def scripted_checkpoint(*, options: dict[str, Any] | None = None, **scripts: Any) -> Path:
        key = repr((scripts, options))
        if key not in folders:
            folder = tmp_path_factory.mktemp("script") / "script"
            folders[key] = write_scripted(folder, scripts, **(options or {}))
        return folders[key]

    return scripted_checkpoint


@pytest.fixture
def set_templates(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``set_templates(default, tool_use)`` replaces the chat templates of the module's ``server``.

    Its model then writes tool calls in the format ``parser``.
    """

    def set_templates(default: str, tool_use: str | None = None, parser: str | None = "hermes"):
        model = dataclasses.replace(
            server.text_engine.model,
            chat_templates=ChatTemplates(default, tool_use),
            tool_call_parser=parser,
        )
        monkeypatch.setattr(server.text_engine, "model", model)

    return set_templates

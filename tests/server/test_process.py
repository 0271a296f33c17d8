"""The server process with fake engines, called by the real client library."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from jaxserve.testing.waiting import wait_until

FAKE = "jaxserve.testing.fake_engine:build"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
MODEL = "fake:vocab=272,step_s=0.01"

SLOW_FACTORY = """
import time
from jaxserve.ipc.messages import Progress

def build(config, engine, on_progress):
    on_progress(Progress(engine, "compile", 1, 8, "programs"))
    time.sleep(600)
"""


class Server:
    """A server process and its output."""

    def __init__(self, *args: str, cwd: Path, factory: str = FAKE) -> None:
        self.lines: list[str] = []
        self._line_added = threading.Condition()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{cwd}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", *args, "--port", "0", "--engine-factory", factory],
            cwd=cwd,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._line_added:
                self.lines.append(line.rstrip("\n"))
                self._line_added.notify_all()
        with self._line_added:
            self.lines.append("")
            self._line_added.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until a line of the output matches, and returns the match."""

        def first_match() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._line_added:
            self._line_added.wait_for(
                lambda: first_match() or self.process.poll() is not None, TIMEOUT_S
            )
            match = first_match()
        assert match is not None, f"no line like {pattern!r} in:\n{self.output}"
        return match

    def wait_ready(self) -> str:
        """Waits until the server is healthy, and returns its URL."""
        url = self.wait_for(r"URL +(http://\S+)/v1")[1]
        assert httpx.get(f"{url}/health").status_code == 200
        return url

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


@contextlib.contextmanager
def running(*args: str, **options) -> Iterator[Server]:
    server = Server(*args, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.wait()
        assert server.process.stderr is not None
        server.process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_front_checkpoint: Callable[..., Path]) -> Path:
    """A folder with a checkpoint, for the tokenizer, under the name of the fake model."""
    folder = tmp_path_factory.mktemp("server")
    make_front_checkpoint(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The URL of a running server with the API key "k"."""
    with running(MODEL, "--served-model-name", "tiny", "--api-key", "k", cwd=folder) as server:
        yield server.wait_ready()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"ignore_eos": True},
}


def test_the_real_client_reads_whole_and_streamed_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    whole = client.chat.completions.create(**CHAT, max_completion_tokens=30, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    stream = client.chat.completions.create(
        **CHAT,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    logprobs = [
        e
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content
    ]
    assert len(logprobs) == 30
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_n_and_several_prompts_return_several_choices(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**CHAT, max_tokens=5, n=3, seed=1)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    batch = client.completions.create(
        model="tiny", prompt=["hello", "world"], max_tokens=5, logprobs=2, temperature=0
    )
    alone = client.completions.create(model="tiny", prompt="world", max_tokens=5, temperature=0)
    assert batch.choices[1].text == alone.choices[0].text
    assert batch.choices[0].text != batch.choices[1].text
    assert batch.choices[0].logprobs is not None
    assert len(batch.choices[0].logprobs.tokens or []) == 5


def test_the_real_client_raises_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, temperature=-1, stream=True)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**CHAT | {"model": "other"})
    unauthorized = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        unauthorized.models.list()
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


async def test_many_concurrent_streams_get_their_own_text(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:

        async def compare(i: int) -> tuple[str, str]:
            body = {"model": "tiny", "prompt": f"prompt {i}", "max_tokens": 20, "temperature": 0}
            stream = await client.completions.create(**body, stream=True)
            text = "".join([c.choices[0].text async for c in stream])
            whole = await client.completions.create(**body)
            return text, whole.choices[0].text

        pairs = await asyncio.gather(*(compare(i) for i in range(40)))
    assert all(streamed == whole for streamed, whole in pairs)
    assert len({whole for _, whole in pairs}) == 40


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer k"}).text
    return float(re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", page, re.M)[1])


def test_a_client_that_disconnects_frees_the_engine(client: openai.OpenAI, url: str) -> None:
    endless = {"max_tokens": 900, "n": 2}
    stream = client.chat.completions.create(**CHAT, **endless, stream=True)
    next(stream)
    assert metric(url, "num_requests_running") == 2
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**CHAT, **endless)
    wait_until(lambda: metric(url, "num_requests_running") == 0)
    assert metric(url, "kv_cache_usage_perc") == 0


def test_a_port_in_use_is_reported_before_the_model_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = str(occupied.getsockname()[1])
        result = subprocess.run(
            [sys.executable, "-m", "server", "/no/such/model", "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert port in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["/no/such/model"], "/no/such/model"),
        ([MODEL, "--chat-template", "/no/file"], "/no/file"),
        (["fake:nonsense"], "fake:nonsense"),
        ([MODEL, "--max-queue", "0"], "--max-queue"),
    ],
)
def test_user_errors_are_one_line_without_a_traceback(folder, args, words) -> None:
    with running(*args, cwd=folder) as server:
        assert server.wait() == 1
    errors = [line for line in server.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in server.output


def test_a_signal_lets_requests_finish_and_then_ends_all_processes(folder: Path) -> None:
    with running(MODEL, "--shutdown-timeout", "50", cwd=folder) as server:
        url = server.wait_ready()
        children = server.children()
        assert children
        body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            events = stream.iter_lines()
            next(events)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Stopping; completions in flight: 1")
            assert httpx.get(f"{url}/health").status_code == 503
            assert httpx.get(f"{url}/live").status_code == 200
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
            *_, last, done = [line for line in events if line]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        psutil.wait_procs(children, timeout=TIMEOUT_S)
        assert not any(child.is_running() for child in children)


def test_a_timeout_or_a_second_signal_aborts_running_requests(folder: Path) -> None:
    for timeout, signals in (("0.2", 1), ("50", 2)):
        with running(MODEL, "--shutdown-timeout", timeout, cwd=folder) as server:
            url = server.wait_ready()
            body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
                events = stream.iter_lines()
                next(events)
                for _ in range(signals):
                    server.process.send_signal(signal.SIGINT)
                    server.wait_for("Stopping")
                *_, last, done = [line for line in events if line]
            assert done == "data: [DONE]"
            assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"
            assert server.wait() == 0


def test_a_starting_server_reports_progress_and_can_be_stopped(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow_factory.py").write_text(SLOW_FACTORY)
    (tmp_path / MODEL).symlink_to(folder / MODEL)
    with running(MODEL, cwd=tmp_path, factory="slow_factory:build") as server:
        server.wait_for("compile")
        # The running phase is printed again every few seconds.
        server.wait_for(r"compile: 1 of 8 programs, [4-9] s")
        (port,) = {
            c.laddr.port
            for c in psutil.Process(server.process.pid).net_connections()
            if c.status == "LISTEN"
        }
        url = f"http://127.0.0.1:{port}"
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "compile" in health.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        children = server.children()
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert "Traceback" not in server.output
        psutil.wait_procs(children, timeout=TIMEOUT_S)
        assert not any(child.is_running() for child in children)

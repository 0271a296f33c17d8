"""Bad, concurrent and abandoned requests, and the state of the engine after them."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxserve.client.protocol import Engine
from jaxserve.front.text_engine import INLINE_CHARS
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.testing.api_client import CHAT, COMPLETIONS, Streamed
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.testing.waiting import wait_until

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
CONTEXT = 2048
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint)


@pytest.fixture(scope="module")
def long_server(serve, tmp_path_factory):
    """A server whose completions can have 2000 tokens, which takes seconds."""
    config = tiny_config(max_position_embeddings=CONTEXT)
    backend = full_backend(config["vocab_size"])
    path = write_checkpoint(tmp_path_factory.mktemp("long") / "long", config, tokenizer=backend)
    return serve(path, num_blocks=4 * CONTEXT // 16 + 1)


def num_finished(server, reason):
    return server.metric("request_success_total", finished_reason=reason)


BAD_REQUESTS = [
    *("not json", "", "[]", '{"prompt":"\\ud800"}', '{"prompt":"a","temperature":NaN}'),
    *({"prompt": value} for value in (None, "", [], [10**6], [-1], [512], [[1], []], [1] * 3000)),
    *({"prompt": "a", "stop": value} for value in ("", [""], ["x"] * 100, [5])),
    *({"prompt": "a", "stop_token_ids": value} for value in ([10**6], [-1], [512], [2**63])),
    *({"prompt": "a", "logit_bias": value} for value in ({"512": 1}, {"-1": 1}, {"x": 1})),
    *({"prompt": "a", "allowed_token_ids": value} for value in ([], [512], [-1], [10**6])),
    *({"prompt": "a", "temperature": value} for value in (-1, "hot")),
    *({"prompt": "a", "response_format": {"type": value}} for value in ("x", 5, "json_schema")),
    {"prompt": "a", "min_tokens": 10, "max_tokens": 5},
    {"prompt": "a", "max_tokens": 10**6},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "n": 10**6},
    {"prompt": "a", "best_of": 2},
    {"prompt": "a", "logprobs": 1000},
    {"prompt": "a", "prompt_logprobs": 5, "stream": True},
    {"prompt": "a", "seed": 2**70},
    {"prompt": "a", "bad_words": [""]},
    {"prompt": "a", "guided_regex": "("},
    {"prompt": "a", "guided_json": {"type": "nonsense"}},
    {"prompt": "a", "guided_choice": []},
    {"prompt": "a", "guided_grammar": "start: nowhere"},
    {"prompt": "a", "model": "nobody"},
    {"prompt": "a", "stream_options": {"include_usage": True}, "stream": False},
    {"prompt": "a", "truncate_prompt_tokens": 0},
]


def test_js_159_bad_requests_do_not_change_a_running_one(long_server) -> None:
    """Bad requests arrive while a good one is running."""
    sampled = {"stream": True, "logprobs": 1, "temperature": 1, "seed": 159}
    body = {**ENDLESS, **sampled, "max_tokens": 1000}
    alone = Streamed.parse(httpx.Headers(), long_server.post(COMPLETIONS, body).content)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_server.post, COMPLETIONS, body)
        for bad in BAD_REQUESTS:
            for stream in (False, True):
                wrong = bad if isinstance(bad, str) else {"stream": stream, **bad}
                reply = long_server.post(COMPLETIONS, wrong)
                assert reply.status_code in (400, 404), (bad, reply.text)
                assert reply.json()["error"]["message"]
        while not running.done():  # repeats some, so that they overlap it for certain
            for bad in BAD_REQUESTS[:20]:
                assert long_server.post(COMPLETIONS, bad).status_code == 400
    disturbed = Streamed.parse(httpx.Headers(), running.result().content)
    assert disturbed.done
    assert disturbed.text() == alone.text()
    assert tokens_and_logprobs(disturbed) == tokens_and_logprobs(alone)
    assert len(tokens_and_logprobs(alone)) == 1000
    long_server.refused(COMPLETIONS, {"prompt": [10**6]})
    long_server.until_idle()


def tokens_and_logprobs(streamed):
    """Returns the tokens of a completion with their log probabilities."""
    parts = [choice["logprobs"] for choice in streamed.choices() if choice["logprobs"]]
    pairs = [pair for p in parts for pair in zip(p["tokens"], p["token_logprobs"], strict=True)]
    return [(token, round(value, 3)) for token, value in pairs]


def test_js_160_a_disconnect_aborts_a_stream(long_server) -> None:
    before = num_finished(long_server, "abort")
    tokens_before = long_server.metric("generation_tokens_total")
    for path in (COMPLETIONS, CHAT):
        body = {**ENDLESS, "messages": [{"role": "user", "content": "x"}], "stream": True}
        with long_server.http.stream("POST", path, json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(3):
                assert next(lines).startswith("data: {")
            assert long_server.metric("num_requests_running") == 1
        long_server.until_idle()
    assert num_finished(long_server, "abort") == before + 2
    # At least the tokens that were read: three, and two after the role of the chat.
    num_tokens = long_server.metric("generation_tokens_total") - tokens_before
    assert 3 + 2 <= num_tokens < 2 * ENDLESS["max_tokens"]


@BOTH_ENDPOINTS
def test_js_161_a_disconnect_aborts_a_request_without_a_stream(long_server, path) -> None:
    before = num_finished(long_server, "abort")
    body = {**ENDLESS, "messages": [{"role": "user", "content": "x"}], "n": 2}
    with httpx.Client(base_url=long_server.url) as client:
        client_thread = threading.Thread(target=post_until_timeout, args=(client, path, body))
        client_thread.start()
        wait_until(lambda: long_server.metric("num_requests_running") == 2)
        client_thread.join()
    long_server.until_idle()
    assert num_finished(long_server, "abort") == before + 2


def post_until_timeout(client, path, body):
    with pytest.raises(httpx.ReadTimeout):
        client.post(path, json=body, timeout=0.5)


def mixed_requests(count, *, seed):
    rng = random.Random(seed)
    kinds = [
        {"max_tokens": 5},
        {"max_tokens": 5, "n": 2},
        {"max_tokens": 5, "echo": True, "logprobs": 2},
        {"max_tokens": 5, "stop": ["a", "b"]},
        {"max_tokens": 1000},
        {"prompt": [10**6]},
        {"max_tokens": 200, "leave": True},
        {"max_tokens": 200, "n": 2, "leave": True},
    ]
    for _ in range(count):
        start = [7] * rng.choice([0, 16, 40])
        prompt = [*start, *(rng.randrange(3, 250) for _ in range(rng.randrange(1, 30)))]
        yield {"prompt": prompt, "ignore_eos": True, **rng.choice(kinds)}


async def send(client, body):
    """Returns the status, or "left" if the client disconnected after the first event."""
    disconnects = body.pop("leave", False)
    if not disconnects:
        return (await client.post(COMPLETIONS, json=body)).status_code
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
        await anext(reply.aiter_lines())
    return "left"


async def test_js_164_no_block_is_leaked(server) -> None:
    async with server.async_http() as client:
        requests = [send(client, body) for body in mixed_requests(200, seed=1)]
        results = Counter(await asyncio.gather(*requests))
    assert results.keys() == {200, 400, "left"}
    assert min(results.values()) > 20
    server.until_idle()
    # Uses all blocks at once: 4 completions, each of the whole context.
    full = {"prompt": [5] * 100, "max_tokens": 156, "ignore_eos": True, "n": 4}
    before = server.metric("num_preemptions_total")
    reply = server.post(COMPLETIONS, full).json()
    assert reply["usage"]["completion_tokens"] == 4 * 156
    assert server.metric("num_preemptions_total") == before
    server.until_idle()


async def test_js_165_request_ids_need_not_be_unique(server) -> None:
    def body(i, **more):
        prompt = [3 + i, 5]
        return {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0, **more}

    alone = [server.post(COMPLETIONS, body(i)).json()["choices"][0]["text"] for i in range(4)]
    assert len(set(alone)) == 4
    async with server.async_http() as client:
        for more, headers in (
            ({}, {"x-request-id": "abc"}),
            ({"request_id": "abc"}, {}),
            ({"request_id": "abc"}, {"x-request-id": "abc"}),
        ):
            replies = await asyncio.gather(
                *(client.post(COMPLETIONS, json=body(i, **more), headers=headers) for i in range(4))
            )
            assert [reply.json()["choices"][0]["text"] for reply in replies] == alone
            assert {reply.headers["x-request-id"] for reply in replies} == {"abc"}
            assert {reply.json()["id"] for reply in replies} == {"cmpl-abc"}


def test_js_166_every_reply_has_a_request_id(server) -> None:
    good = {"prompt": [1, 2], "max_tokens": 2}
    for body, status in (
        (good, 200),
        ({**good, "stream": True}, 200),
        ({**good, "temperature": -1}, 400),
        ({**good, "model": "nobody"}, 404),
        ({}, 400),
    ):
        reply = server.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "given-1"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, "given-1")
        ids = [server.post(COMPLETIONS, body).headers["x-request-id"] for _ in range(2)]
        assert len({*ids, ""}) == 3
    for path in ("/nowhere", "/health", "/metrics", "/v1/models"):
        reply = server.http.get(path, headers={"x-request-id": "given-2"})
        assert reply.headers["x-request-id"] == "given-2"
    assert server.http.put(COMPLETIONS).headers["x-request-id"]


@pytest.mark.parametrize(
    "given_id",
    [
        *(b"x" * 60_000, b"x" * 500, b"x" * 129, b"a\tb", b"a b", b"", "\u4e2d".encode(), b"\xff"),
        *(b'a"b', b"a{b}", b"<script>", b"a\\nb", b"data: x", b"../x"),
    ],
)
def test_js_167_invalid_request_ids_are_replaced(server, caplog, given_id) -> None:
    body = {"prompt": [1, 2], "max_tokens": 9, "ignore_eos": True, "stream": True}
    headers = [(b"x-request-id", given_id)]
    reply = server.http.post(COMPLETIONS, json=body, headers=headers)
    assert reply.status_code == 200
    replacement = reply.headers["x-request-id"]
    assert replacement.encode() != given_id
    assert replacement.isascii()
    assert 0 < len(replacement) <= 128
    assert len(reply.content) < 10_000
    assert not given_id or given_id not in reply.content
    assert f'"id":"cmpl-{replacement}"'.encode() in reply.content
    if len(given_id) > 100:
        assert given_id.decode() not in caplog.text
    refused = server.http.post(COMPLETIONS, json={**body, "n": 0}, headers=headers)
    assert refused.status_code == 400
    with contextlib.suppress(UnicodeDecodeError):
        body |= {"request_id": given_id.decode(), "stream": False}
        reply = server.post(COMPLETIONS, body)
        assert reply.status_code == 200
        assert len(reply.json()["id"]) < 200
        assert given_id.decode() != reply.headers["x-request-id"]


def test_js_170_long_prompts_are_encoded_outside_the_event_loop(server, monkeypatch) -> None:
    """While a long prompt of each kind of call is encoded, other requests are served."""
    encode = server.tokenizer.encode
    may_continue, starts = threading.Event(), threading.Semaphore(0)

    def slow_encode(text, **options):
        if len(text) > INLINE_CHARS:
            starts.release()
            assert may_continue.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(server.tokenizer, "encode", slow_encode)
    text = "hello world " * 50
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(server.post, path, body)
            for path, body in (
                (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 9, "max_tokens": 1}),
                ("/tokenize", {"prompt": text}),
            )
        ]
        for _ in waiting:
            assert starts.acquire(timeout=60)
        assert server.http.get("/health").status_code == 200
        assert server.stream_complete([1, 2], max_tokens=20, ignore_eos=True).done
        assert not any(request.done() for request in waiting)
        may_continue.set()
    assert [request.result().status_code for request in waiting] == [200, 200]


def test_js_170_long_chats_are_rendered_outside_the_event_loop(server, monkeypatch) -> None:
    started, may_continue = threading.Event(), threading.Event()

    def slow_render(*args, **options):
        started.set()
        assert may_continue.wait(60)
        return "hello"

    monkeypatch.setattr("jaxserve.openai.prompts.render_chat", slow_render)
    text = "hello world " * (2**20 // 12)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, text, max_tokens=1)
        assert started.wait(60)
        assert server.http.get("/health").status_code == 200
        assert server.stream_complete([1, 2], max_tokens=20, ignore_eos=True).done
        assert not waiting.done()
        may_continue.set()
    assert waiting.result()["usage"]["prompt_tokens"] == 1


class HeldEngine:
    """An engine that starts no request before ``may_start`` is set."""

    def __init__(self, engine: Engine, may_start: threading.Event) -> None:
        self._engine = engine
        self._may_start = may_start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        assert await asyncio.to_thread(self._may_start.wait, 60)
        async with contextlib.aclosing(
            self._engine.generate(request, on_ended=on_ended)
        ) as outputs:
            async for output in outputs:
                yield output


async def test_js_179_requests_over_the_admission_limit_are_refused(
    serve, random_checkpoint, monkeypatch
) -> None:
    """Of 50 requests at an admission limit of 4, 46 are refused at once and 4 are served."""
    server = serve(random_checkpoint, max_queue=4)
    may_start = threading.Event()
    monkeypatch.setattr(
        server.text_engine, "engine", HeldEngine(server.text_engine.engine, may_start)
    )
    body = {"prompt": [1, 2], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    accepted, refused = [], []
    async with server.async_http() as client:
        requests = [client.post(COMPLETIONS, json=body) for _ in range(50)]
        for request in asyncio.as_completed(requests, timeout=60):
            reply = await request
            (accepted if reply.status_code == 200 else refused).append(reply)
            if len(refused) == 46:
                may_start.set()
    assert len(accepted) == 4
    for reply in accepted:
        assert reply.json()["usage"]["completion_tokens"] == 200
    for reply in refused:
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == "queue_full"
    server.until_idle()
    server.good_request()
    error = server.refused(COMPLETIONS, {**body, "n": 5})
    assert error["param"] in ("n", "prompt")


async def test_js_180_more_requests_than_fit_are_all_served(serve, random_checkpoint) -> None:
    """The requests need more blocks than there are; some prompts need half of the blocks."""
    server = serve(random_checkpoint, num_blocks=33)
    rng = random.Random(180)
    sizes = [rng.choice([1, 10, 40, 200]) for _ in range(200)]
    finished: list[int] = []

    async def complete(client, i):
        body = {"prompt": [3 + i] * sizes[i], "max_tokens": 12, "ignore_eos": True}
        reply = await client.post(COMPLETIONS, json=body)
        finished.append(i)
        return reply.json()["usage"]

    async with server.async_http() as client:
        usages = await asyncio.gather(*(complete(client, i) for i in range(200)))
    for size, usage in zip(sizes, usages, strict=True):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (size, 12)
    # First come, first served: most of the first requests are among the first to finish.
    assert len(set(finished[:100]) & set(range(100))) > 70
    server.until_idle()

"""Requests that are bad, many, or left alone, and what they leave behind."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxserve.client.protocol import Engine
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.testing.api_client import CHAT, COMPLETIONS, Streamed
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
CONTEXT = 2048
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(serve, rand):
    return serve(rand)


@pytest.fixture(scope="module")
def long(serve, tmp_path_factory):
    """Answers here can have 2000 tokens, which takes seconds."""
    config = tiny_config(max_position_embeddings=CONTEXT)
    backend = full_backend(config["vocab_size"])
    path = write_checkpoint(tmp_path_factory.mktemp("long") / "long", config, tokenizer=backend)
    return serve(path, num_blocks=4 * CONTEXT // 16 + 1)


def num_finished(server, reason):
    return server.metric("request_success_total", finished_reason=reason)


BAD = [
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


def test_js_159_no_bad_request_harms_another(long) -> None:
    """All of them come while a good one runs; it must not have ended before."""
    body = {**ENDLESS, "stream": True, "logprobs": 1, "temperature": 1, "seed": 159}
    quiet = Streamed.parse(httpx.Headers(), long.post(COMPLETIONS, body).content)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long.post, COMPLETIONS, body)
        for bad in BAD:
            for stream in (False, True):
                wrong = bad if isinstance(bad, str) else {"stream": stream, **bad}
                reply = long.post(COMPLETIONS, wrong)
                assert reply.status_code in (400, 404), (bad, reply.text)
                assert reply.json()["error"]["message"]
        while not running.done():  # and again, so that some meet it for certain
            for bad in BAD[:20]:
                assert long.post(COMPLETIONS, bad).status_code == 400
    busy = Streamed.parse(httpx.Headers(), running.result().content)
    assert busy.done
    assert busy.text() == quiet.text()
    assert numbers_of(busy) == numbers_of(quiet)
    assert len(numbers_of(quiet)) == 2000
    long.refused(COMPLETIONS, {"prompt": [10**6]})
    long.until_idle()


def numbers_of(streamed):
    """The tokens of an answer with their log probabilities."""
    parts = [choice["logprobs"] for choice in streamed.choices() if choice["logprobs"]]
    pairs = [pair for p in parts for pair in zip(p["tokens"], p["token_logprobs"], strict=True)]
    return [(token, round(value, 3)) for token, value in pairs]


def test_js_160_a_stream_that_is_left_ends(long) -> None:
    before = num_finished(long, "abort")
    for path in (COMPLETIONS, CHAT):
        body = {**ENDLESS, "messages": [{"role": "user", "content": "x"}], "stream": True}
        with long.http.stream("POST", path, json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(3):
                assert next(lines).startswith("data: {")
            assert long.metric("num_requests_running") == 1
        long.until_idle()
    assert num_finished(long, "abort") == before + 2
    assert long.metric("generation_tokens_total") > 0


@BOTH
def test_js_161_a_request_that_is_left_ends(long, path) -> None:
    before = num_finished(long, "abort")
    body = {**ENDLESS, "messages": [{"role": "user", "content": "x"}], "n": 2}
    with httpx.Client(base_url=long.url) as impatient:
        waiting = threading.Thread(target=give_up, args=(impatient, path, body))
        waiting.start()
        long.until(lambda: long.metric("num_requests_running") == 2)
        waiting.join()
    long.until_idle()
    assert num_finished(long, "abort") == before + 2


def give_up(client, path, body):
    with pytest.raises(httpx.ReadTimeout):
        client.post(path, json=body, timeout=0.5)


def mixed_requests(count, *, seed):
    numbers = random.Random(seed)
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
        start = [7] * numbers.choice([0, 16, 40])
        prompt = [*start, *(numbers.randrange(3, 250) for _ in range(numbers.randrange(1, 30)))]
        yield {"prompt": prompt, "ignore_eos": True, **numbers.choice(kinds)}


async def send(client, body):
    """The status; "left" if the client has left after the first event."""
    leaves = body.pop("leave", False)
    if not leaves:
        return (await client.post(COMPLETIONS, json=body)).status_code
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
        await anext(reply.aiter_lines())
    return "left"


async def test_js_164_no_block_is_lost(server) -> None:
    async with server.async_http() as client:
        requests = [send(client, body) for body in mixed_requests(200, seed=1)]
        results = Counter(await asyncio.gather(*requests))
    assert results.keys() == {200, 400, "left"}
    assert min(results.values()) > 20
    server.until_idle()
    # All blocks at once: 4 answers, each of the whole context.
    whole = {"prompt": [5] * 100, "max_tokens": 156, "ignore_eos": True, "n": 4}
    before = server.metric("num_preemptions_total")
    reply = server.post(COMPLETIONS, whole).json()
    assert reply["usage"]["completion_tokens"] == 4 * 156
    assert server.metric("num_preemptions_total") == before
    server.until_idle()


async def test_js_165_ids_need_not_be_unique(server) -> None:
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


def test_js_166_every_reply_has_an_id(server) -> None:
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
    "given",
    [
        *(b"x" * 60_000, b"x" * 500, b"x" * 129, b"a\tb", b"a b", b"", "\u4e2d".encode(), b"\xff"),
        *(b'a"b', b"a{b}", b"<script>", b"a\\nb", b"data: x", b"../x"),
    ],
)
def test_js_167_odd_ids_are_replaced(server, caplog, given) -> None:
    body = {"prompt": [1, 2], "max_tokens": 9, "ignore_eos": True, "stream": True}
    headers = [(b"x-request-id", given)]
    reply = server.http.post(COMPLETIONS, json=body, headers=headers)
    assert reply.status_code == 200
    own = reply.headers["x-request-id"]
    assert own.encode() != given
    assert own.isascii()
    assert 0 < len(own) <= 128
    assert len(reply.content) < 10_000
    assert not given or given not in reply.content
    assert f'"id":"cmpl-{own}"'.encode() in reply.content
    if len(given) > 100:
        assert given.decode() not in caplog.text
    refused = server.http.post(COMPLETIONS, json={**body, "n": 0}, headers=headers)
    assert refused.status_code == 400
    with contextlib.suppress(UnicodeDecodeError):
        body |= {"request_id": given.decode(), "stream": False}
        reply = server.post(COMPLETIONS, body)
        assert reply.status_code == 200
        assert len(reply.json()["id"]) < 200
        assert given.decode() != reply.headers["x-request-id"]


def test_js_170_long_texts_are_encoded_beside_the_loop(server, monkeypatch) -> None:
    """While three are being encoded, and for as long as it takes, others are served."""
    encode, may_go_on, count = server.tokenizer.encode, threading.Event(), threading.Semaphore(0)

    def slow_encode(text, **options):
        if len(text) > 100_000:
            count.release()
            assert may_go_on.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(server.tokenizer, "encode", slow_encode)
    text = "hello world " * (2**20 // 12)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(server.post, path, body)
            for path, body in (
                (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 9, "max_tokens": 1}),
                (COMPLETIONS, {"prompt": ["a", text], "truncate_prompt_tokens": 9}),
                ("/tokenize", {"prompt": text}),
            )
        ]
        for _ in waiting:
            assert count.acquire(timeout=60)
        assert server.http.get("/health").status_code == 200
        assert server.stream_complete([1, 2], max_tokens=20, ignore_eos=True).done
        assert not any(request.done() for request in waiting)
        may_go_on.set()
    assert [request.result().status_code for request in waiting] == [200, 200, 200]


def test_js_170_long_chats_are_rendered_beside_the_loop(server, monkeypatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow_render(*args, **options):
        begun.set()
        assert may_go_on.wait(60)
        return "hello"

    monkeypatch.setattr("jaxserve.openai.prompts.render_chat", slow_render)
    text = "hello world " * (2**20 // 12)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, text, max_tokens=1)
        assert begun.wait(60)
        assert server.http.get("/health").status_code == 200
        assert server.stream_complete([1, 2], max_tokens=20, ignore_eos=True).done
        assert not waiting.done()
        may_go_on.set()
    assert waiting.result()["usage"]["prompt_tokens"] == 1


class Held:
    """An engine that starts nothing before it may."""

    def __init__(self, engine: Engine, may_start: threading.Event) -> None:
        self._engine = engine
        self._may_start = may_start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        assert await asyncio.to_thread(self._may_start.wait, 60)
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                yield output


async def test_js_179_a_full_queue_says_so(serve, rand, monkeypatch) -> None:
    """50 at once for 4 places: 46 hear at once that there are none, and 4 are served."""
    server = serve(rand, max_queue=4)
    may_start = threading.Event()
    monkeypatch.setattr(server.text_engine, "engine", Held(server.text_engine.engine, may_start))
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


async def test_js_180_all_of_many_are_served(serve, rand) -> None:
    """More than the blocks hold, among them prompts that need half of the blocks."""
    server = serve(rand, num_blocks=33)
    numbers = random.Random(180)
    sizes = [numbers.choice([1, 10, 40, 200]) for _ in range(200)]
    done: list[int] = []

    async def one(client, i):
        body = {"prompt": [3 + i] * sizes[i], "max_tokens": 12, "ignore_eos": True}
        reply = await client.post(COMPLETIONS, json=body)
        done.append(i)
        return reply.json()["usage"]

    async with server.async_http() as client:
        usages = await asyncio.gather(*(one(client, i) for i in range(200)))
    for size, usage in zip(sizes, usages, strict=True):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (size, 12)
    # First come, first served: of those that come first most are among the first to be done.
    assert len(set(done[:100]) & set(range(100))) > 70
    server.until_idle()

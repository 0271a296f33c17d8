"""Streams, server-sent events, and text from tokens."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from jaxserve.ipc.messages import FinishReason, RequestOutput
from jaxserve.testing.api_client import CHAT, COMPLETIONS, Streamed
from jaxserve.testing.scripted_checkpoint import EOS, SPM_EOS

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
HELD = ["xy", "a", b"\xf0", b"\x9f", b"\x94", b"\xa5", "x", "y!", "ok", EOS]
HELD_TEXT = "xya\U0001f525xy!ok"
HOLDING = {"stop": ["xyz"], "max_tokens": 20}
"""Text is held back for the stop string, which is begun three times and never comes."""


@pytest.fixture(scope="module")
def server(serve, script):
    scripts = {"held": HELD, "ab": ["A", "B", EOS], "long": ["1", "2", "3", "4", "5", "6", "7"]}
    return serve(script(**scripts)).one_token_at_a_time()


def body(path, start, **more):
    """A request to either endpoint that is answered with a script."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": f"<{start}>"}], **more}
    return {"prompt": f"<{start}>", **more}


def text_of(reply):
    (choice,) = reply["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


SPLIT = {
    "fire": ([b"\xf0", b"\x9f", b"\x94", b"\xa5", "ok"], "\U0001f525ok"),
    "two": ([b"\xc3", b"\xa9", "x"], "\xe9x"),
    "three": (["a", b"\xe4", b"\xb8", b"\xad"], "a\u4e2d"),
    "cut": ([b"a\xe4\xb8", b"\xad\xe4", b"\xb8\xadb"], "a\u4e2d\u4e2db"),
    "joined": (
        [b"\xf0\x9f", b"\x91\xa9\xe2", b"\x80\x8d\xf0\x9f\x9a", b"\x80"],
        "\U0001f469\u200d\U0001f680",
    ),
    "unfinished": (["b", b"\xe2", b"\x82"], "b\ufffd"),
    "broken": (["c", b"\xe3", "d", b"\xbf", "e"], "c\ufffdd\ufffde"),
}


@pytest.mark.parametrize("name", SPLIT)
@BOTH
def test_js_001_bytes_of_a_character_wait_for_each_other(serve, script, path, name) -> None:
    checkpoint = script(**{name: [*pieces, EOS] for name, (pieces, _) in SPLIT.items()})
    server = serve(checkpoint).one_token_at_a_time()
    pieces, text = SPLIT[name]
    for max_tokens in (len(pieces), len(pieces) + 1):
        request = body(path, name, max_tokens=max_tokens)
        streamed = server.stream(path, request)
        assert text_of(server.post(path, request).json()) == streamed.text() == text


def test_js_002_many_characters_in_many_cuts(serve, script) -> None:
    """Some are three tokens, some two, some one; no token may come twice."""
    numbers = random.Random(2)
    pieces: list[bytes] = []
    text = ""
    tails = [bytes([b]) for b in range(0x80, 0xC0)]
    numbers.shuffle(tails)
    for i in range(30):
        lead = bytes([0xE4 + i % 6])
        middle, last = tails.pop(), tails.pop()
        cut = 3 if i < 6 else numbers.choice([1, 2])
        pieces += {1: [lead + middle + last], 2: [lead + middle, last], 3: [lead, middle, last]}[
            cut
        ]
        text += (lead + middle + last).decode()
    server = serve(script(cjk=[*pieces, EOS])).one_token_at_a_time()
    streamed = server.stream_complete("<cjk>", max_tokens=200)
    reply = server.complete("<cjk>", max_tokens=200, return_token_ids=True)["choices"][0]
    assert len(reply["token_ids"]) == len(pieces) + 1 > 50
    assert server.tokenizer.decode(reply["token_ids"]) == text
    assert reply["text"] == streamed.text() == text


@pytest.mark.parametrize(
    ("name", "text"), [("hello", "Hello world again"), ("led", " leading"), ("bytes", " \u4e2d x")]
)
@BOTH
def test_js_005_spaces_of_sentencepiece_tokens(serve, script, path, name, text) -> None:
    server = serve(
        script(
            hello=["Hello", " world", " again", SPM_EOS],
            led=[" lead", "ing", SPM_EOS],
            bytes=[" ", b"\xe4", b"\xb8", b"\xad", " x", SPM_EOS],
            options={"spm": True},
        )
    ).one_token_at_a_time()
    request = body(path, name, max_tokens=9)
    assert server.stream(path, request).text() == text
    assert text_of(server.post(path, request).json()) == text


@BOTH
def test_js_007_usage_comes_once_when_asked_for(server, path) -> None:
    request = body(path, "long", max_tokens=5)
    asked = server.stream(path, {**request, "stream_options": {"include_usage": True}})
    plain = server.stream(path, request)
    expected = server.post(path, request).json()["usage"]
    assert expected["completion_tokens"] == 5
    assert expected["total_tokens"] == expected["prompt_tokens"] + 5
    assert [chunk["usage"] for chunk in asked.chunks if chunk.get("usage")] == [expected]
    assert asked.usage == expected
    assert asked.done
    assert not any(chunk.get("usage") for chunk in plain.chunks)
    assert len(asked.chunks) == len(plain.chunks) + 1 == 5 + 1 + (path == CHAT)


@BOTH
def test_js_008_the_usage_chunk_has_no_choices(server, path) -> None:
    request = body(path, "ab", max_tokens=9, stream_options={"include_usage": True})
    *chunks, last = server.stream(path, request).chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    for chunk in chunks:
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None


@BOTH
def test_js_009_stream_options_out_of_place_or_empty(server, path) -> None:
    options = {"include_usage": True}
    for off in (False, None):
        request = body(path, "ab", max_tokens=2, stream_options=options, stream=off)
        assert server.refused(path, request)["param"] == "stream_options"
    for empty in (None, {}, {"include_usage": None}, {"include_usage": False}):
        streamed = server.stream(path, body(path, "ab", max_tokens=2, stream_options=empty))
        assert streamed.text() == "AB"
        assert not any(chunk.get("usage") for chunk in streamed.chunks)
    alone = server.stream(
        path, body(path, "ab", max_tokens=2, stream_options={"continuous_usage_stats": True})
    )
    assert alone.text() == "AB"
    both = {"include_usage": True, "continuous_usage_stats": True}
    streamed = server.stream(path, body(path, "long", max_tokens=4, stream_options=both))
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert counts == [*([0] if path == CHAT else []), 1, 2, 3, 4, 4]
    for wrong in (3, "yes", [], {"include_usage": "yes"}):
        request = body(path, "ab", stream=True, stream_options=wrong)
        assert server.refused(path, request)["param"].startswith("stream_options")


@pytest.mark.parametrize("max_tokens", [3, 9, 20])
@BOTH
def test_js_010_usage_counts_tokens_and_not_chunks(server, path, max_tokens) -> None:
    request = body(path, "held", **{**HOLDING, "max_tokens": max_tokens})
    streamed = server.stream(path, {**request, "stream_options": {"include_usage": True}})
    sampled = min(max_tokens, len(HELD))
    assert streamed.usage["completion_tokens"] == sampled
    assert server.post(path, request).json()["usage"] == streamed.usage
    assert len(streamed.deltas()) < sampled


@BOTH
def test_js_011_a_natural_end_says_stop(server, path) -> None:
    streamed = server.stream(path, body(path, "ab", max_tokens=20))
    assert streamed.finish_reason() == "stop"
    assert streamed.done
    assert streamed.text() == "AB"


@BOTH
def test_js_012_chunks_have_every_field(server, path) -> None:
    options = {"include_usage": True}
    request = body(path, "held", **HOLDING, n=2, stream_options=options, logprobs=1)
    if path == CHAT:
        request["logprobs"] = True
    chunks = server.stream(path, request).chunks
    assert len(chunks) == 2 * (len(HELD) + (path == CHAT)) + 1
    for chunk in chunks:
        # Whether JSON's numbers and texts fit the types of the official client, as they stand.
        if path == CHAT:
            ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
        else:
            known = {**chunk, "choices": [c for c in chunk["choices"] if c["finish_reason"]]}
            Completion.model_validate_json(json.dumps(known), strict=True)
        assert chunk.keys() >= {"id", "object", "created", "model", "choices"}
        for choice in chunk["choices"]:
            assert choice.keys() >= {"index", "finish_reason"}
            assert ("delta" if path == CHAT else "text") in choice


@pytest.mark.parametrize("n", [1, 3])
def test_js_013_the_role_comes_first_and_once(server, n) -> None:
    streamed = server.stream_chat("<long>", max_tokens=4, n=n)
    for index in range(n):
        first, *rest = (choice["delta"] for choice in streamed.choices(index))
        assert first["role"] == "assistant"
        assert first["content"] == ""
        assert "".join(delta.get("content") or "" for delta in rest) == "1234"
        assert all(delta.get("role") is None for delta in rest)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 7, 20])
def test_js_014_every_chunk_has_a_delta(server, max_tokens) -> None:
    streamed = server.stream_chat("<held>", **{**HOLDING, "max_tokens": max_tokens})
    deltas = [choice["delta"] for choice in streamed.choices()]
    assert all(isinstance(delta, dict) for delta in deltas)
    assert all(isinstance(delta.get("content", ""), str) for delta in deltas)
    assert streamed.finish_reason() == ("stop" if max_tokens == 20 else "length")


class FailingEngine:
    """Breaks off the answers to one prompt after some tokens: as the engine does, or by a bug."""

    def __init__(self, engine, prompt, *, after, how) -> None:
        self._engine, self._prompt, self._after, self._how = engine, prompt, after, how

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        left = self._after if request.prompt_token_ids == self._prompt else math.inf
        outputs = self._engine.generate(request)
        async for output in outputs:
            if len(output.token_ids) < left:
                left -= len(output.token_ids)
                yield output
                continue
            if left:
                ids = output.token_ids[:left]
                yield RequestOutput(request.request_id, ids, scheduled_s=output.scheduled_s)
            await outputs.aclose()
            if self._how == "bug":
                raise RuntimeError("secret")
            yield RequestOutput(request.request_id, [], FinishReason.ERROR)
            return


@pytest.fixture(params=["engine", "bug"])
def failing(server, monkeypatch, request):
    """Makes the answers to <long> fail after so many tokens."""

    def fail(*, after: int) -> None:
        prompt = server.tokenizer.encode("<long>")
        engine = FailingEngine(server.text_engine.engine, prompt, after=after, how=request.param)
        monkeypatch.setattr(server.text_engine, "engine", engine)

    return fail


@pytest.mark.parametrize("n", [1, 2])
@BOTH
def test_js_016_a_failure_after_the_headers_is_told(server, failing, path, n) -> None:
    failing(after=3)
    with ThreadPoolExecutor() as pool:
        x = pool.submit(server.stream, path, body(path, "long", max_tokens=9, n=n))
        y = pool.submit(server.stream, path, body(path, "held", **HOLDING))
    *chunks, error = x.result().chunks
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]].count(None) == len(
        chunks
    )
    assert x.result().raw.startswith(b"data: ")
    assert set(error) == {"error"}
    assert error["error"]["code"] == 500
    assert error["error"]["message"]
    assert "secret" not in error["error"]["message"]
    assert y.result().text() == HELD_TEXT
    server.good_request()
    server.until_idle()


def test_js_017_errors_are_the_same_with_and_without_a_stream(server, serve, script) -> None:
    raising = serve(
        script(
            ab=["A", "B", EOS],
            options={"tokenizer_config": {"chat_template": "{{ raise_exception('no') }}"}},
        )
    )
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    cases = [
        (server, COMPLETIONS, {"prompt": [1] * 300}, 400),
        (server, COMPLETIONS, {"prompt": "<ab>", "model": "nobody"}, 404),
        (server, COMPLETIONS, {"prompt": "<ab>", "logit_bias": {"100000": 1}}, 400),
        (server, COMPLETIONS, {"prompt": "<ab>", "logit_bias": {"x": 1}}, 400),
        (server, COMPLETIONS, {"prompt": "<ab>", "temperature": -1}, 400),
        (server, CHAT, body(CHAT, "ab", model="nobody"), 404),
        (server, CHAT, body(CHAT, "ab", response_format=schema), 400),
        (server, CHAT, body(CHAT, "x" * 300), 400),
        (raising, CHAT, body(CHAT, "ab"), 400),
    ]
    for of, path, request, status in cases:
        plain = of.refused(path, {**request, "stream": False}, status=status)
        assert of.refused(path, {**request, "stream": True}, status=status) == plain


@pytest.mark.parametrize("n", [1, 2])
@BOTH
def test_js_018_a_failure_before_the_first_token_is_told(server, failing, path, n) -> None:
    failing(after=0)
    check_failure(server, path, body(path, "long", max_tokens=9, n=n))


@pytest.mark.parametrize("after", [0, 3])
def test_js_018_one_of_several_prompts_fails(server, failing, after) -> None:
    failing(after=after)
    check_failure(server, COMPLETIONS, {"prompt": ["<held>", "<long>", "<ab>"], "max_tokens": 9})


def check_failure(server, path, request):
    """A reply, and the end of a stream, that say that something has gone wrong."""
    whole = server.post(path, request)
    assert whole.status_code == 500
    assert whole.json()["error"]["message"]
    streamed = server.post(path, {**request, "stream": True})
    if streamed.status_code == 200:
        *_, error = Streamed.parse(streamed.headers, streamed.content).chunks
    else:
        assert streamed.status_code == 500
        error = streamed.json()
    assert error["error"]["message"]
    server.good_request()
    server.until_idle()


@BOTH
def test_js_019_chunks_of_a_stream_have_one_id(server, path) -> None:
    options = {"include_usage": True}
    request = body(path, "long", max_tokens=5, n=2, stream_options=options)
    streams = [server.stream(path, request) for _ in range(2)]
    for streamed in streams:
        for key in ("id", "created", "model", "object", "system_fingerprint"):
            assert len({str(chunk[key]) for chunk in streamed.chunks}) == 1, key
    prefix = "chatcmpl-" if path == CHAT else "cmpl-"
    ids = {streamed.chunks[0]["id"] for streamed in streams}
    assert len(ids) == 2
    assert all(i.startswith(prefix) for i in ids)


def test_js_020_numbers_of_silent_steps_are_not_lost(server) -> None:
    request = body(CHAT, "held", **HOLDING, logprobs=True, top_logprobs=2)
    streamed = server.stream(CHAT, {**request, "stream_options": {"include_usage": True}})
    whole = server.post(CHAT, request).json()
    entries = [
        entry
        for choice in streamed.choices()
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(entries) == streamed.usage["completion_tokens"] == len(HELD)
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == HELD_TEXT
    completion = server.stream_complete("<held>", **HOLDING, logprobs=2)
    tokens = [t for c in completion.choices() if c["logprobs"] for t in c["logprobs"]["tokens"]]
    reply = server.complete("<held>", **HOLDING, logprobs=2)
    assert tokens == reply["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == len(HELD)


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
@BOTH
def test_js_021_events_are_framed_exactly(server, path, more) -> None:
    streamed = server.stream(path, body(path, "held", **HOLDING, **more))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert streamed.raw.count(b"[DONE]") == 1
    events = streamed.raw.removesuffix(b"\n\n").split(b"\n\n")
    for event in events[:-1]:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        json.loads(event.removeprefix(b"data: "))

"""Streaming: server-sent events, chunks, usage, and the text of tokens."""

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

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
HELD_BACK = ["xy", "a", b"\xf0", b"\x9f", b"\x94", b"\xa5", "x", "y!", "ok", EOS]
HELD_BACK_TEXT = "xya\U0001f525xy!ok"
HOLD_BACK = {"stop": ["xyz"], "max_tokens": 20}
"""Text is held back three times for a stop string that begins but never completes."""


@pytest.fixture(scope="module")
def server(serve, scripted_checkpoint):
    scripts = {
        "held": HELD_BACK,
        "ab": ["A", "B", EOS],
        "long": ["1", "2", "3", "4", "5", "6", "7"],
    }
    return serve(scripted_checkpoint(**scripts)).with_one_token_per_output()


def body(path, start, **more):
    """Returns a request to either endpoint whose prompt ends in ``<start>``."""
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
@BOTH_ENDPOINTS
def test_js_001_a_split_character_is_sent_whole(serve, scripted_checkpoint, path, name) -> None:
    checkpoint = scripted_checkpoint(
        **{name: [*pieces, EOS] for name, (pieces, _) in SPLIT.items()}
    )
    server = serve(checkpoint).with_one_token_per_output()
    pieces, text = SPLIT[name]
    for max_tokens in (len(pieces), len(pieces) + 1):
        request = body(path, name, max_tokens=max_tokens)
        streamed = server.stream(path, request)
        assert text_of(server.post(path, request).json()) == streamed.text() == text


def test_js_002_characters_are_decoded_however_they_are_split(serve, scripted_checkpoint) -> None:
    """Characters have one, two or three tokens. A script must not contain a token twice."""
    rng = random.Random(2)
    pieces: list[bytes] = []
    text = ""
    tails = [bytes([b]) for b in range(0x80, 0xC0)]
    rng.shuffle(tails)
    for i in range(30):
        lead = bytes([0xE4 + i % 6])
        middle, last = tails.pop(), tails.pop()
        cut = 3 if i < 6 else rng.choice([1, 2])
        pieces += {1: [lead + middle + last], 2: [lead + middle, last], 3: [lead, middle, last]}[
            cut
        ]
        text += (lead + middle + last).decode()
    server = serve(scripted_checkpoint(cjk=[*pieces, EOS])).with_one_token_per_output()
    streamed = server.stream_complete("<cjk>", max_tokens=200)
    reply = server.complete("<cjk>", max_tokens=200, return_token_ids=True)["choices"][0]
    assert len(reply["token_ids"]) == len(pieces) + 1 > 50
    assert server.tokenizer.decode(reply["token_ids"]) == text
    assert reply["text"] == streamed.text() == text


@pytest.mark.parametrize(
    ("name", "text"), [("hello", "Hello world again"), ("led", " leading"), ("bytes", " \u4e2d x")]
)
@BOTH_ENDPOINTS
def test_js_005_spaces_of_sentencepiece_tokens_are_kept(
    serve, scripted_checkpoint, path, name, text
) -> None:
    server = serve(
        scripted_checkpoint(
            hello=["Hello", " world", " again", SPM_EOS],
            led=[" lead", "ing", SPM_EOS],
            bytes=[" ", b"\xe4", b"\xb8", b"\xad", " x", SPM_EOS],
            options={"spm": True},
        )
    ).with_one_token_per_output()
    request = body(path, name, max_tokens=9)
    assert server.stream(path, request).text() == text
    assert text_of(server.post(path, request).json()) == text


@BOTH_ENDPOINTS
def test_js_007_usage_is_sent_once_if_requested(server, path) -> None:
    request = body(path, "long", max_tokens=5)
    with_usage = server.stream(path, {**request, "stream_options": {"include_usage": True}})
    without_usage = server.stream(path, request)
    expected = server.post(path, request).json()["usage"]
    assert expected["completion_tokens"] == 5
    assert expected["total_tokens"] == expected["prompt_tokens"] + 5
    assert [chunk["usage"] for chunk in with_usage.chunks if chunk.get("usage")] == [expected]
    assert with_usage.usage == expected
    assert with_usage.done
    assert not any(chunk.get("usage") for chunk in without_usage.chunks)
    assert len(with_usage.chunks) == len(without_usage.chunks) + 1 == 5 + 1 + (path == CHAT)


@BOTH_ENDPOINTS
def test_js_008_the_usage_chunk_has_no_choices(server, path) -> None:
    request = body(path, "ab", max_tokens=9, stream_options={"include_usage": True})
    *chunks, last = server.stream(path, request).chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    for chunk in chunks:
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None


@BOTH_ENDPOINTS
def test_js_009_stream_options_need_a_stream_and_may_be_empty(server, path) -> None:
    options = {"include_usage": True}
    for stream in (False, None):
        request = body(path, "ab", max_tokens=2, stream_options=options, stream=stream)
        assert server.refused(path, request)["param"] == "stream_options"
    for empty in (None, {}, {"include_usage": None}, {"include_usage": False}):
        streamed = server.stream(path, body(path, "ab", max_tokens=2, stream_options=empty))
        assert streamed.text() == "AB"
        assert not any(chunk.get("usage") for chunk in streamed.chunks)
    without_totals = server.stream(
        path, body(path, "ab", max_tokens=2, stream_options={"continuous_usage_stats": True})
    )
    assert without_totals.text() == "AB"
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    streamed = server.stream(path, body(path, "long", max_tokens=4, stream_options=continuous))
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert counts == [*([0] if path == CHAT else []), 1, 2, 3, 4, 4]
    for wrong in (3, "yes", [], {"include_usage": "yes"}):
        request = body(path, "ab", stream=True, stream_options=wrong)
        assert server.refused(path, request)["param"].startswith("stream_options")


@pytest.mark.parametrize("max_tokens", [3, 9, 20])
@BOTH_ENDPOINTS
def test_js_010_usage_counts_tokens_and_not_chunks(server, path, max_tokens) -> None:
    request = body(path, "held", **{**HOLD_BACK, "max_tokens": max_tokens})
    streamed = server.stream(path, {**request, "stream_options": {"include_usage": True}})
    sampled = min(max_tokens, len(HELD_BACK))
    assert streamed.usage["completion_tokens"] == sampled
    assert server.post(path, request).json()["usage"] == streamed.usage
    assert len(streamed.deltas()) < sampled


@BOTH_ENDPOINTS
def test_js_011_the_finish_reason_of_an_end_token_is_stop(server, path) -> None:
    streamed = server.stream(path, body(path, "ab", max_tokens=20))
    assert streamed.finish_reason() == "stop"
    assert streamed.done
    assert streamed.text() == "AB"


@BOTH_ENDPOINTS
def test_js_012_every_chunk_has_the_required_fields(server, path) -> None:
    options = {"include_usage": True}
    request = body(path, "held", **HOLD_BACK, n=2, stream_options=options, logprobs=1)
    if path == CHAT:
        request["logprobs"] = True
    chunks = server.stream(path, request).chunks
    assert len(chunks) == 2 * (len(HELD_BACK) + (path == CHAT)) + 1
    for chunk in chunks:
        # Strict: the types of the official client accept the JSON values without conversion.
        if path == CHAT:
            ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
        else:
            finished = {**chunk, "choices": [c for c in chunk["choices"] if c["finish_reason"]]}
            Completion.model_validate_json(json.dumps(finished), strict=True)
        assert chunk.keys() >= {"id", "object", "created", "model", "choices"}
        for choice in chunk["choices"]:
            assert choice.keys() >= {"index", "finish_reason"}
            assert ("delta" if path == CHAT else "text") in choice


@pytest.mark.parametrize("n", [1, 3])
def test_js_013_the_role_is_sent_once_in_the_first_chunk(server, n) -> None:
    streamed = server.stream_chat("<long>", max_tokens=4, n=n)
    for index in range(n):
        first, *rest = (choice["delta"] for choice in streamed.choices(index))
        assert first["role"] == "assistant"
        assert first["content"] == ""
        assert "".join(delta.get("content") or "" for delta in rest) == "1234"
        assert all(delta.get("role") is None for delta in rest)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 7, 20])
def test_js_014_every_chunk_has_a_delta(server, max_tokens) -> None:
    streamed = server.stream_chat("<held>", **{**HOLD_BACK, "max_tokens": max_tokens})
    deltas = [choice["delta"] for choice in streamed.choices()]
    assert all(isinstance(delta, dict) for delta in deltas)
    assert all(isinstance(delta.get("content", ""), str) for delta in deltas)
    assert streamed.finish_reason() == ("stop" if max_tokens == 20 else "length")


class FailingEngine:
    """Fails the requests with one prompt after some tokens: with an error output, or by a bug."""

    def __init__(self, engine, prompt, *, after, kind) -> None:
        self._engine, self._prompt, self._after, self._kind = engine, prompt, after, kind

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request, *, on_ended=None):
        remaining = self._after if request.prompt_token_ids == self._prompt else math.inf
        outputs = self._engine.generate(request, on_ended=on_ended)
        async for output in outputs:
            if len(output.token_ids) < remaining:
                remaining -= len(output.token_ids)
                yield output
                continue
            if remaining:
                ids = output.token_ids[:remaining]
                yield RequestOutput(request.request_id, ids, scheduled_s=output.scheduled_s)
            await outputs.aclose()
            if self._kind == "bug":
                raise RuntimeError("secret")
            yield RequestOutput(request.request_id, [], FinishReason.ERROR)
            return


@pytest.fixture(params=["engine", "bug"])
def inject_failure(server, monkeypatch, request):
    """``inject_failure(after=3)`` makes the completions of ``<long>`` fail after 3 tokens."""

    def fail(*, after: int) -> None:
        prompt = server.tokenizer.encode("<long>")
        engine = FailingEngine(server.text_engine.engine, prompt, after=after, kind=request.param)
        monkeypatch.setattr(server.text_engine, "engine", engine)

    return fail


@pytest.mark.parametrize("n", [1, 2])
@BOTH_ENDPOINTS
def test_js_016_a_failure_after_the_headers_is_reported(server, inject_failure, path, n) -> None:
    inject_failure(after=3)
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(server.stream, path, body(path, "long", max_tokens=9, n=n))
        other = pool.submit(server.stream, path, body(path, "held", **HOLD_BACK))
    *chunks, error = failed.result().chunks
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]].count(None) == len(
        chunks
    )
    assert failed.result().raw.startswith(b"data: ")
    assert set(error) == {"error"}
    assert error["error"]["code"] == 500
    assert error["error"]["message"]
    assert "secret" not in error["error"]["message"]
    assert other.result().text() == HELD_BACK_TEXT
    server.good_request()
    server.until_idle()


def test_js_017_errors_are_the_same_with_and_without_streaming(
    server, serve, scripted_checkpoint
) -> None:
    raising_server = serve(
        scripted_checkpoint(
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
        (raising_server, CHAT, body(CHAT, "ab"), 400),
    ]
    for target, path, request, status in cases:
        plain = target.refused(path, {**request, "stream": False}, status=status)
        assert target.refused(path, {**request, "stream": True}, status=status) == plain


@pytest.mark.parametrize("n", [1, 2])
@BOTH_ENDPOINTS
def test_js_018_a_failure_before_the_first_token_is_reported(
    server, inject_failure, path, n
) -> None:
    inject_failure(after=0)
    assert_error_reported(server, path, body(path, "long", max_tokens=9, n=n))


@pytest.mark.parametrize("after", [0, 3])
def test_js_018_a_failure_of_one_prompt_is_reported(server, inject_failure, after) -> None:
    inject_failure(after=after)
    assert_error_reported(
        server, COMPLETIONS, {"prompt": ["<held>", "<long>", "<ab>"], "max_tokens": 9}
    )


def assert_error_reported(server, path, request):
    """Asserts that the reply, and the end of the stream, report an internal error."""
    reply = server.post(path, request)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"]
    streamed = server.post(path, {**request, "stream": True})
    if streamed.status_code == 200:
        *_, error = Streamed.parse(streamed.headers, streamed.content).chunks
    else:
        assert streamed.status_code == 500
        error = streamed.json()
    assert error["error"]["message"]
    server.good_request()
    server.until_idle()


@BOTH_ENDPOINTS
def test_js_019_chunks_of_a_stream_share_one_id(server, path) -> None:
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


def test_js_020_logprobs_of_held_back_text_are_sent(server) -> None:
    request = body(CHAT, "held", **HOLD_BACK, logprobs=True, top_logprobs=2)
    streamed = server.stream(CHAT, {**request, "stream_options": {"include_usage": True}})
    reply = server.post(CHAT, request).json()
    entries = [
        entry
        for choice in streamed.choices()
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(entries) == streamed.usage["completion_tokens"] == len(HELD_BACK)
    assert entries == reply["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == HELD_BACK_TEXT
    completion = server.stream_complete("<held>", **HOLD_BACK, logprobs=2)
    tokens = [t for c in completion.choices() if c["logprobs"] for t in c["logprobs"]["tokens"]]
    reply = server.complete("<held>", **HOLD_BACK, logprobs=2)
    assert tokens == reply["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == len(HELD_BACK)


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
@BOTH_ENDPOINTS
def test_js_021_events_follow_the_sse_format(server, path, more) -> None:
    streamed = server.stream(path, body(path, "held", **HOLD_BACK, **more))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert streamed.raw.count(b"[DONE]") == 1
    events = streamed.raw.removesuffix(b"\n\n").split(b"\n\n")
    for event in events[:-1]:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        json.loads(event.removeprefix(b"data: "))

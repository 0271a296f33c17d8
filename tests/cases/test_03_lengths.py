"""Length limits: the context, max_tokens and the size of the KV cache."""

import logging

import pytest

from jaxserve.errors import ConfigError
from jaxserve.testing.api_client import CHAT, COMPLETIONS

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def checkpoint(scripted_checkpoint):
    return scripted_checkpoint(on=["a", "b"])


@pytest.fixture(scope="module")
def server(serve, checkpoint):
    return serve(checkpoint)


def body(path, text="<on>", **more):
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **more}
    return {"prompt": text, **more}


def length_and_reason(server, path, **more):
    """Returns the number of completion tokens and the finish reason."""
    reply = server.post(path, body(path, **more))
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return reply.json()["usage"]["completion_tokens"], choice["finish_reason"]


@pytest.mark.parametrize("max_tokens", [None, 1, 5])
@pytest.mark.parametrize("length", [32, 40, 3000])
def test_js_045_a_prompt_longer_than_the_context_is_refused(
    serve, checkpoint, max_tokens, length
) -> None:
    server = serve(checkpoint, max_model_len=32)
    before = server.metric("prompt_tokens_total")
    requests = [
        (COMPLETIONS, {"prompt": [1] * length}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * length}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * length]}, "prompt"),
        (CHAT, body(CHAT, "x" * length), "messages"),
    ]
    for path, request, param in requests:
        reply = server.post(path, {**request, "max_tokens": max_tokens})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert "32" in error["message"]
        assert str(length) in error["message"]
        assert "-" not in error["message"]
    assert server.metric("prompt_tokens_total") == before
    server.good_request()


def test_js_046_prompt_plus_max_tokens_must_fit_the_context(serve, checkpoint) -> None:
    server = serve(checkpoint, max_model_len=32)
    requests = [
        (COMPLETIONS, {"prompt": [1] * 8, "max_tokens": 30}, "max_tokens"),
        (COMPLETIONS, {"prompt": [1] * 8, "max_tokens": 25}, "max_tokens"),
        (CHAT, body(CHAT, "x" * 8, max_completion_tokens=30), "max_completion_tokens"),
        (CHAT, body(CHAT, "x" * 8, max_tokens=30), "max_tokens"),
    ]
    for path, request, param in requests:
        error = server.refused(path, request)
        assert error["code"] == "context_length_exceeded"
        requested = request.get("max_tokens") or request["max_completion_tokens"]
        for number in (8, requested, 32):
            assert str(number) in error["message"]
        assert error["param"] == param
    # A request that fits exactly is served.
    reply = server.complete([1] * 8, max_tokens=24, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 32
    assert reply["choices"][0]["finish_reason"] == "length"


def test_js_048_max_tokens_has_a_default(server) -> None:
    assert length_and_reason(server, COMPLETIONS) == (16, "length")
    assert length_and_reason(server, COMPLETIONS, max_tokens=None) == (16, "length")
    assert length_and_reason(server, CHAT) == (255, "length")
    # Near the end of the context, the context is the limit.
    reply = server.complete([1] * 250, ignore_eos=True)
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (
        6,
        "length",
    )


def test_js_049_max_completion_tokens_overrides_max_tokens(server, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert length_and_reason(server, CHAT, max_completion_tokens=3) == (3, "length")
        assert length_and_reason(server, CHAT, max_tokens=9, max_completion_tokens=3) == (
            3,
            "length",
        )
        assert length_and_reason(server, CHAT, max_tokens=3, max_completion_tokens=None) == (
            3,
            "length",
        )
        assert length_and_reason(server, COMPLETIONS, max_completion_tokens=4, max_tokens=4) == (
            4,
            "length",
        )
        assert length_and_reason(server, COMPLETIONS, max_completion_tokens=4) == (4, "length")
    assert not [r for r in caplog.records if "max_" in r.getMessage()]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-1, 2.5, True, False, 1e12, 10**12, 2**64, "5", [5], {}])
@BOTH_ENDPOINTS
def test_js_050_invalid_lengths_are_refused(server, path, value, field) -> None:
    assert server.refused(path, body(path, **{field: value}))["param"] == field


def test_js_050_zero_tokens_are_allowed_for_completions_only(server) -> None:
    assert server.refused(CHAT, body(CHAT, max_tokens=0))["param"] == "max_tokens"
    for echo, text in ((False, ""), (True, "<on>")):
        reply = server.complete("<on>", max_tokens=0, echo=echo)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert reply["usage"]["completion_tokens"] == 0
        assert server.stream_complete("<on>", max_tokens=0, echo=echo).text() == text


def test_js_051_a_request_larger_than_the_kv_cache_is_refused(serve, checkpoint) -> None:
    """The cache has 11 usable blocks of 4 tokens; the context of the model is 256 tokens."""
    with pytest.raises(ConfigError, match="largest that fits is 44"):
        serve(checkpoint, max_model_len=256, block_size=4, num_blocks=12)
    server = serve(checkpoint, block_size=4, num_blocks=12)
    for length, max_tokens in ((100, 1), (100, None), (45, 1), (40, 100)):
        request = {"prompt": [1] * length, "max_tokens": max_tokens}
        error = server.refused(COMPLETIONS, request)
        assert error["code"] == "context_length_exceeded"
        assert "44" in error["message"]
    assert server.complete([1] * 20, max_tokens=20, ignore_eos=True)["usage"]["total_tokens"] == 40
    server.until_idle()

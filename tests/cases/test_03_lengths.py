"""Limits of prompts and answers."""

import logging

import pytest

from jaxserve.errors import ConfigError
from jaxserve.testing.api_client import CHAT, COMPLETIONS

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def checkpoint(script):
    return script(on=["a", "b"])


@pytest.fixture(scope="module")
def server(serve, checkpoint):
    return serve(checkpoint)


def body(path, text="<on>", **more):
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **more}
    return {"prompt": text, **more}


def answer(server, path, **more):
    """How many tokens came, and why no more."""
    reply = server.post(path, body(path, **more))
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return reply.json()["usage"]["completion_tokens"], choice["finish_reason"]


@pytest.mark.parametrize("max_tokens", [None, 1, 5])
@pytest.mark.parametrize("length", [32, 40, 3000])
def test_js_045_a_prompt_over_the_context(serve, checkpoint, max_tokens, length) -> None:
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


def test_js_046_prompt_and_answer_over_the_context(serve, checkpoint) -> None:
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
        asked = request.get("max_tokens") or request["max_completion_tokens"]
        for number in (8, asked, 32):
            assert str(number) in error["message"]
        assert error["param"] == param
    # What fits exactly is served.
    reply = server.complete([1] * 8, max_tokens=24, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 32
    assert reply["choices"][0]["finish_reason"] == "length"


def test_js_048_answers_of_no_given_length(server) -> None:
    assert answer(server, COMPLETIONS) == (16, "length")
    assert answer(server, COMPLETIONS, max_tokens=None) == (16, "length")
    assert answer(server, CHAT) == (255, "length")
    # Near the end of the context both stop there.
    reply = server.complete([1] * 250, ignore_eos=True)
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (
        6,
        "length",
    )


def test_js_049_both_names_of_the_length(server, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert answer(server, CHAT, max_completion_tokens=3) == (3, "length")
        assert answer(server, CHAT, max_tokens=9, max_completion_tokens=3) == (3, "length")
        assert answer(server, CHAT, max_tokens=3, max_completion_tokens=None) == (3, "length")
        assert answer(server, COMPLETIONS, max_completion_tokens=4, max_tokens=4) == (4, "length")
        assert answer(server, COMPLETIONS, max_completion_tokens=4) == (4, "length")
    assert not [r for r in caplog.records if "max_" in r.getMessage()]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-1, 2.5, True, False, 1e12, 10**12, 2**64, "5", [5], {}])
@BOTH
def test_js_050_impossible_lengths(server, path, value, field) -> None:
    assert server.refused(path, body(path, **{field: value}))["param"] == field


def test_js_050_zero_tokens(server) -> None:
    assert server.refused(CHAT, body(CHAT, max_tokens=0))["param"] == "max_tokens"
    for echo, text in ((False, ""), (True, "<on>")):
        reply = server.complete("<on>", max_tokens=0, echo=echo)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert reply["usage"]["completion_tokens"] == 0
        assert server.stream_complete("<on>", max_tokens=0, echo=echo).text() == text


def test_js_051_a_prompt_that_no_pool_can_hold(serve, checkpoint) -> None:
    """11 blocks of 4 tokens can be handed out; the model's own context is 256."""
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

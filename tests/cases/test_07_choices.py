"""Several choices for one prompt, with the parameter ``n``."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxserve.sampling_params import MAX_N
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS, EOS_ID

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint)


def body(path, text, **more):
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **more}
    return {"prompt": text, **more}


def texts_of(reply):
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in reply.json()["choices"]
    ]


@BOTH_ENDPOINTS
def test_js_105_choices_of_concurrent_requests_do_not_mix(server, path) -> None:
    sampled = {"n": 4, "temperature": 1.2, "max_tokens": 12, "return_token_ids": True}
    one, other = (body(path, text, seed=seed, **sampled) for text, seed in (("a", 5), ("b", 6)))
    first = server.post(path, one)
    assert [choice["index"] for choice in first.json()["choices"]] == [0, 1, 2, 3]
    texts = texts_of(first)
    assert len(set(texts)) == 4
    num_tokens = sum(len(choice["token_ids"]) for choice in first.json()["choices"])
    assert first.json()["usage"]["completion_tokens"] == num_tokens
    second = texts_of(server.post(path, other))
    assert second != texts
    # 16 completions at once, of which 4 can run.
    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(server.post, path, request) for request in (one, other)]
        streams = [pool.submit(server.stream, path, request) for request in (one, other)]
    for future, expected in zip(replies, (texts, second), strict=True):
        assert texts_of(future.result()) == expected
    for future, expected in zip(streams, (texts, second), strict=True):
        assert [future.result().text(i) for i in range(4)] == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_prompts", [1, 2])
@BOTH_ENDPOINTS
def test_js_106_a_disconnect_aborts_every_choice(server, path, num_prompts, stream) -> None:
    def num_aborted():
        return server.metric("request_success_total", finished_reason="abort")

    text = "a" if path == CHAT else ["a"] * num_prompts
    num_choices = 3 if path == CHAT else 3 * num_prompts
    request = body(path, text, n=3, ignore_eos=True, max_tokens=200, stream=stream)
    # The model is fast: completions may finish before the server notices the disconnect.
    for _ in range(100):
        before = num_aborted()
        with httpx.Client(base_url=server.url) as client:
            if stream:
                read_three_events(client, path, request)
            else:
                with contextlib.suppress(httpx.ReadTimeout):
                    client.post(path, json=request, timeout=0.05)
        server.until_idle(within_s=60)
        assert server.text_engine.num_in_flight == 0
        if num_aborted() == before + num_choices:
            break
    else:
        pytest.fail("no disconnect aborted every choice")
    server.good_request()


def read_three_events(client, path, request):
    """Reads three events of a stream and disconnects."""
    with client.stream("POST", path, json=request) as reply:
        lines = reply.iter_lines()
        for _ in range(3):
            assert next(lines).startswith("data: ")
            next(lines)


@BOTH_ENDPOINTS
def test_js_107_n_must_be_an_integer_from_1_to_the_limit(server, path) -> None:
    for n in (MAX_N + 1, 512, 10**9, 2**70, 0, -1, 1.5, True, "2", [2]):
        error = server.refused(path, body(path, "a", n=n, max_tokens=2))
        assert error["param"] == "n"
        if type(n) is int and n > 0 and n < 2**63:
            assert str(MAX_N) in error["message"]
    reply = server.post(path, body(path, "a", n=MAX_N, max_tokens=2, ignore_eos=True))
    assert len(reply.json()["choices"]) == MAX_N
    assert reply.json()["usage"]["completion_tokens"] == 2 * MAX_N
    server.until_idle()


@BOTH_ENDPOINTS
def test_js_108_each_choice_has_its_own_finish_reason(serve, scripted_checkpoint, path) -> None:
    """After each token, a completion ends with a probability of about 0.1."""
    server = serve(scripted_checkpoint(on=["x"], options={"sharpness": 0.1}))
    (x,) = server.tokenizer.encode("x")
    sampling = {"temperature": 1, "seed": 3, "allowed_token_ids": [x, EOS_ID], "n": 8}
    request = body(path, "<on>", **sampling, max_tokens=12, return_token_ids=True)
    choices = server.post(path, request).json()["choices"]
    streamed = server.stream(path, request)
    for choice in choices:
        ids = choice["token_ids"]
        assert choice["finish_reason"] == ("stop" if ids[-1] == EOS_ID else "length")
        assert len(ids) == 12 or ids[-1] == EOS_ID
        assert streamed.finish_reason(choice["index"]) == choice["finish_reason"]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    assert len({len(choice["token_ids"]) for choice in choices}) > 3


def test_js_108_finish_reasons_of_several_prompts_do_not_mix(serve, scripted_checkpoint) -> None:
    server = serve(
        scripted_checkpoint(short=["a", "b", EOS], long=["1", "2", "3", "4", "5", "6", "7"])
    )
    reply = server.complete(["<short>", "<long>", "<short>"], n=2, max_tokens=4)
    reasons = [choice["finish_reason"] for choice in reply["choices"]]
    assert reasons == ["stop", "stop", "length", "length", "stop", "stop"]

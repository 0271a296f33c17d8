"""Prompts: strings, token IDs and lists of them, their order and their usage."""

import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS

NINE = ["a", "b", "c", "d", "e", "f", "g", "h", EOS]


@pytest.fixture(scope="module")
def server(serve, scripted_checkpoint):
    return serve(scripted_checkpoint(nine=NINE, one=[EOS], two=["Z", EOS]))


@pytest.fixture(scope="module")
def with_bos(serve, scripted_checkpoint):
    options = {"tokenizer_config": {"add_bos_token": True}}
    return serve(scripted_checkpoint(two=["Z", EOS], options=options))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["", [""], ["x", ""], ["", ""]])
def test_js_053_an_empty_string_needs_a_bos_token(server, with_bos, prompt, stream) -> None:
    request = {"prompt": prompt, "max_tokens": 3, "stream": stream}
    assert server.refused(COMPLETIONS, request)["param"] == "prompt"
    server.until_idle()
    # With a BOS token, the prompt is not empty.
    reply = with_bos.post(COMPLETIONS, {**request, "ignore_eos": True})
    assert reply.status_code == 200
    if not stream:
        num_prompts = len(prompt) if isinstance(prompt, list) else 1
        assert len(reply.json()["choices"]) == num_prompts
        assert reply.json()["usage"]["prompt_tokens"] == num_prompts + len("".join(prompt))
        assert reply.json()["usage"]["completion_tokens"] == 3 * num_prompts


@pytest.mark.parametrize("prompt", [[], [[]], [[], [1, 2]], [[1, 2], []], None])
def test_js_054_prompts_without_tokens_are_refused(server, with_bos, prompt) -> None:
    for target in (server, with_bos):
        assert target.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 3})["param"] == "prompt"
        target.until_idle()


@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_js_054_a_chat_that_renders_to_nothing_is_refused(
    serve, scripted_checkpoint, template
) -> None:
    options = {"tokenizer_config": {"chat_template": template}}
    server = serve(scripted_checkpoint(two=["Z", EOS], options=options))
    for messages in ([], [{"role": "user", "content": ""}], [{"role": "user", "content": None}]):
        server.refused(CHAT, {"messages": messages, "max_tokens": 3})
        server.until_idle()


def test_js_055_token_ids_are_used_unchanged(server, with_bos, serve, random_checkpoint) -> None:
    random_server = serve(random_checkpoint)
    ids = random_server.tokenizer.encode("hello world, and more")
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    by_text, by_ids, batch = (
        random_server.complete(prompt, **greedy) for prompt in ("hello world, and more", ids, [ids])
    )
    assert by_ids["choices"] == by_text["choices"] == batch["choices"]
    assert by_ids["usage"] == by_text["usage"] == batch["usage"]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    assert with_bos.complete("abc", max_tokens=1)["usage"]["prompt_tokens"] == 4
    reply = with_bos.complete([5, 6, 7], max_tokens=1, return_token_ids=True)
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["choices"][0]["prompt_token_ids"] == [5, 6, 7]


@pytest.mark.parametrize("as_ids", [True, False])
def test_js_056_choices_are_in_the_order_of_the_prompts(server, as_ids) -> None:
    """The first prompt finishes last."""
    prompts = ["xy<nine>", "<two>", "x<one>", "<nine>", "<one>", "y<two>"]
    texts = ["abcdefgh", "Z", "", "abcdefgh", "", "Z"]
    ids = [server.tokenizer.encode(prompt) for prompt in prompts]
    request = {"prompt": ids if as_ids else prompts, "max_tokens": 12}
    reply = server.complete(**request)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert reply["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
    options = {"include_usage": True}
    streamed = server.stream(COMPLETIONS, {**request, "stream_options": options})
    assert [streamed.text(i) for i in range(6)] == texts
    assert [streamed.finish_reason(i) for i in range(6)] == ["stop"] * 6
    assert [chunk["usage"] for chunk in streamed.chunks if chunk.get("usage")] == [reply["usage"]]


MALFORMED = [
    *(["a", [1]], [[1], "a"], [1, "a"], ["a", 1], [1, 2.5], [1.0, 2.5], [1, [2]], [[1], 2]),
    *([True, False], [1, True], [[True]], [None], ["a", None], [1, None], [[None]], [[1], None]),
    *({"a": 1}, [{"a": 1}], 5, 1.5, True, [[[1]]], [["a"]], [[1, "a"]], [[1.5]]),
]


@pytest.mark.parametrize("prompt", MALFORMED, ids=repr)
def test_js_057_malformed_prompts_are_refused(server, prompt) -> None:
    error = server.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert error["param"] == "prompt"
    server.until_idle()


@pytest.mark.parametrize("bad", [512, 513, 100_000, 2**31, 2**32 + 1, 2**63, 2**70, -1, -(2**40)])
def test_js_058_token_ids_outside_the_vocabulary_are_refused(server, bad) -> None:
    control = server.complete([1, 2], max_tokens=4, temperature=0)["choices"]
    for prompt in ([bad], [1, bad, 2], [[1, 2], [bad]]):
        error = server.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
        assert error["param"] == "prompt"
        if abs(bad) < 2**63:  # the message may show a larger number differently
            assert str(bad) in error["message"]
    assert server.complete([1, 2], max_tokens=4, temperature=0)["choices"] == control
    assert server.complete([511], max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_js_061_each_prompt_gets_n_choices(serve, random_checkpoint, server) -> None:
    request = {"prompt": ["a", "b"], "n": 2, "seed": 1, "temperature": 1, "max_tokens": 3}
    reply = serve(random_checkpoint).complete(**request)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    alone = [
        choice["text"]
        for prompt in "ab"
        for choice in serve(random_checkpoint).complete(**{**request, "prompt": prompt})["choices"]
    ]
    assert [choice["text"] for choice in reply["choices"]] == alone
    assert len(set(alone)) > 2
    streamed = serve(random_checkpoint).stream(COMPLETIONS, request)
    assert [streamed.text(i) for i in range(4)] == alone
    scripted = server.complete(["<two>", "<nine>"], n=3, max_tokens=3)["choices"]
    assert [choice["text"] for choice in scripted] == ["Z", "Z", "Z", "abc", "abc", "abc"]


def reply_and_stream_usage(server, request):
    """Returns the usage of a reply and the usage of its stream."""
    usage = server.complete(**request)["usage"]
    options = {"include_usage": True}
    return usage, server.stream(COMPLETIONS, {**request, "stream_options": options}).usage


PREFIX = [*range(40, 88)]


def test_js_062_usage_is_the_sum_over_prompts(serve, random_checkpoint) -> None:
    prompts = [[*PREFIX, 1], [2] * 20, [*PREFIX, 3]]
    plain, streamed = reply_and_stream_usage(
        serve(random_checkpoint), {"prompt": prompts, "max_tokens": 3, "ignore_eos": True, "n": 2}
    )
    for usage in (plain, streamed):
        assert usage["prompt_tokens"] == 49 + 20 + 49
        assert usage["completion_tokens"] == 18
        assert usage["total_tokens"] == 118 + 18
    assert plain["prompt_tokens_details"].keys() == streamed["prompt_tokens_details"].keys()


@pytest.mark.xfail(strict=True, reason="there is no prefix cache yet: nothing is ever cached")
def test_js_062_cached_tokens_are_the_sum_over_prompts(serve, random_checkpoint) -> None:
    server = serve(random_checkpoint)
    server.complete(PREFIX, max_tokens=1)
    prompts = [[*PREFIX, 1], [2] * 20, [*PREFIX, 3]]
    server.complete(prompts, max_tokens=1)
    for usage in reply_and_stream_usage(server, {"prompt": prompts, "max_tokens": 1}):
        assert usage["prompt_tokens_details"]["cached_tokens"] == 48 + 16 + 48

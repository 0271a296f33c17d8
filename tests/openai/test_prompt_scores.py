"""Echo, prompt log probabilities and token IDs, which tools that score texts need."""

import json
import random
from typing import Any

import msgspec
import pytest

from jaxserve.openai import chat, completions
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.testing.scripted_engine import logprobs_of
from jaxserve.testing.scripted_text_engine import scripted_text_engine

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he"}]


def to_json(value: msgspec.Struct) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(value), parse_constant=pytest.fail)


async def complete(text_engine, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply, after comparing it with a stream if the request can have one."""
    request = decode(json.dumps({"prompt": "hello"} | body).encode(), CompletionRequest)
    reply = to_json(await completions.complete(await completions.prepare(text_engine, request)))
    if "prompt_logprobs" in body:
        return reply
    request = msgspec.structs.replace(request, stream=True)
    job = await completions.prepare(text_engine, request)
    chunks = [to_json(chunk) async for chunk in completions.stream(job)]
    for choice in reply["choices"]:
        parts = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
        assert choice["text"] == "".join(part["text"] for part in parts)
        assert choice["finish_reason"] == parts[-1]["finish_reason"]
        assert choice.get("prompt_token_ids") == parts[0].get("prompt_token_ids")
        if "token_ids" in choice:
            assert choice["token_ids"] == [i for part in parts for i in part["token_ids"]]
        for key, values in (choice["logprobs"] or {}).items():
            pieces = [part["logprobs"][key] for part in parts if part["logprobs"]]
            assert values == [value for piece in pieces for value in piece]
    return reply


async def test_requests_like_those_of_lm_eval_score_every_token() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 5, 40)]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    reply = await complete(scripted_text_engine([33]), body | {"max_tokens": 1})
    for i, prompt in enumerate(prompts):
        choice = reply["choices"][i]
        scores = choice["logprobs"]
        assert choice["index"] == i
        assert {len(values) for values in scores.values()} == {len(prompt) + 1}
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        for token, value, top in zip(
            scores["tokens"][1:],
            scores["token_logprobs"][1:],
            scores["top_logprobs"][1:],
            strict=True,
        ):
            assert top[token] == value
        expected = [logprobs_of(token, 1).logprobs[0] for token in [*prompt[1:], 33]]
        assert scores["token_logprobs"][1:] == expected
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("prompt", ["hello world", [72, 256, 33], ["hello", "the in"]])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_a_prompt_can_be_scored_without_a_completion(prompt, n, logprobs) -> None:
    text_engine = scripted_text_engine("never seen", tokens_per_output=3)
    body = {"prompt": prompt, "n": n, "echo": True, "logprobs": logprobs, "max_tokens": 0}
    reply = await complete(text_engine, body)
    assert text_engine.engine.submitted[-1].params.max_tokens == 1
    assert reply["usage"]["completion_tokens"] == 0
    texts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    for choice in reply["choices"]:
        choice_prompt = texts[choice["index"] // n]
        text = (
            choice_prompt
            if isinstance(choice_prompt, str)
            else text_engine.model.tokenizer.decode(choice_prompt)
        )
        assert choice["text"] == text
        assert choice["finish_reason"] == "length"
        if logprobs is not None:
            assert "".join(choice["logprobs"]["tokens"]) == text
    without_echo = await complete(text_engine, body | {"echo": False})
    assert {choice["text"] for choice in without_echo["choices"]} == {""}


async def test_offsets_point_at_the_text_of_their_token() -> None:
    for echo in (True, False):
        for prompt in ("hello world", [72, 83, 256]):
            body = {"prompt": prompt, "echo": echo, "logprobs": 2, "max_tokens": 6}
            (choice,) = (await complete(scripted_text_engine("the hello"), body))["choices"]
            scores = choice["logprobs"]
            for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
                if token != "<|im_end|>":
                    assert choice["text"][offset:].startswith(token)


async def test_a_bos_token_has_no_length_in_the_text() -> None:
    text_engine = scripted_text_engine("he")
    bos = text_engine.model.tokenizer.bos_token_id
    text_engine.model.tokenizer._prefix = (bos,)
    body = {"echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = (await complete(text_engine, body))["choices"]
    assert choice["text"] == "hellohe"
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "hello", "he"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echo_and_logprobs_are_independent_in_every_choice(echo, logprobs) -> None:
    body = {"prompt": [72, 73], "n": 2, "echo": echo, "logprobs": logprobs}
    reply = await complete(scripted_text_engine("hello", "in"), body)
    prompt = ["i", "j"] if echo else []
    assert len(reply["choices"]) == 2
    for i, (choice, word) in enumerate(zip(reply["choices"], ("hello", "in"), strict=True)):
        assert choice["index"] == i
        assert choice["text"] == "".join(prompt) + word
        assert choice["finish_reason"] == "stop"
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert choice["logprobs"]["tokens"] == [*prompt, word, "<|im_end|>"]
            values = choice["logprobs"]["token_logprobs"]
            assert [value is None for value in values] == [echo] + [False] * (len(values) - 1)


@pytest.mark.parametrize("k", [0, 3])
async def test_completions_and_chats_return_prompt_logprobs(k) -> None:
    text_engine = scripted_text_engine("hello")
    body = {"prompt": [72, 290], "prompt_logprobs": k, "echo": True, "logprobs": 1}
    (choice,) = (await complete(text_engine, body))["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert list(second)[0] == "290"
    assert second["290"]["rank"] == 2
    assert len(second) == max(k, 1)
    assert len(choice["logprobs"]["top_logprobs"][1]) <= 2
    request = decode(json.dumps({"messages": MESSAGES, "prompt_logprobs": k}).encode(), ChatRequest)
    reply = to_json(await chat.complete(await chat.prepare(text_engine, request)))
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


async def test_token_ids_are_returned_on_request() -> None:
    text_engine = scripted_text_engine("hello é")
    completion_ids = [
        *text_engine.model.tokenizer.encode("hello é"),
        text_engine.model.tokenizer.eos_token_id,
    ]
    reply = await complete(text_engine, {"return_token_ids": True, "n": 2})
    for choice in reply["choices"]:
        assert choice["token_ids"] == completion_ids
        assert choice["prompt_token_ids"] == text_engine.model.tokenizer.encode("hello")
    body = {"messages": MESSAGES, "return_token_ids": True}
    request = decode(json.dumps(body).encode(), ChatRequest)
    reply = to_json(await chat.complete(await chat.prepare(text_engine, request)))
    prompt = text_engine.engine.submitted[-1].prompt_token_ids
    assert reply["prompt_token_ids"] == prompt
    assert reply["choices"][0]["token_ids"] == completion_ids
    job = await chat.prepare(text_engine, msgspec.structs.replace(request, stream=True))
    first, *chunks = [to_json(chunk) async for chunk in chat.stream(job)]
    assert first["prompt_token_ids"] == prompt
    assert "prompt_token_ids" not in chunks[0]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == completion_ids


async def test_logprobs_can_show_tokens_as_ids() -> None:
    text_engine = scripted_text_engine([33, 34])
    body = {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 2, "echo": True}
    (choice,) = (await complete(text_engine, {"prompt": [72, 256]} | body))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (72, 256, 33, 34)]
    assert choice["logprobs"]["top_logprobs"][1].keys() == {"token_id:256", "token_id:255"}
    assert choice["logprobs"]["text_offset"] == [0, 1, 3, 4]


async def test_a_prompt_can_be_truncated_at_its_beginning() -> None:
    text_engine = scripted_text_engine("hello")
    cases = [
        ({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2}, [3, 4]),
        ({"prompt": [1, 2], "truncate_prompt_tokens": 9}, [1, 2]),
        ({"prompt": list(range(280)), "truncate_prompt_tokens": -1}, list(range(280))[-255:]),
        (
            {"prompt": list(range(280)), "truncate_prompt_tokens": -1, "max_tokens": 20},
            list(range(280))[-236:],
        ),
    ]
    for body, expected in cases:
        reply = await complete(text_engine, body)
        assert text_engine.engine.submitted[-1].prompt_token_ids == expected
        assert reply["usage"]["prompt_tokens"] == len(expected)
    body = {"prompt": "the hello" * 999, "truncate_prompt_tokens": 1, "echo": True}
    (choice,) = (await complete(text_engine, body))["choices"]
    assert choice["text"] == "hellohello"


async def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    text_engine = scripted_text_engine("hello")
    await complete(text_engine, {"bad_words": ["world", "he"], "allowed_token_ids": [5, 6]})
    params = text_engine.engine.submitted[-1].params
    encode = text_engine.model.tokenizer.encode
    expected = ("world", " world", "he", " he")
    assert params.bad_words_token_ids == tuple(tuple(encode(word)) for word in expected)
    assert params.allowed_token_ids == (5, 6)


async def test_a_chat_can_echo_the_message_that_it_continues() -> None:
    text_engine = scripted_text_engine("llo")
    body = {"messages": MESSAGES, "continue_final_message": True, "echo": True}
    request = decode(json.dumps(body).encode(), ChatRequest)
    reply = await chat.complete(await chat.prepare(text_engine, request))
    assert reply.choices[0].message.content == "hello"
    job = await chat.prepare(text_engine, msgspec.structs.replace(request, stream=True))
    chunks = [chunk async for chunk in chat.stream(job)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello"

"""Whole replies and streams have the same text, counts and log probabilities."""

import json
from typing import Any

import msgspec
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jaxserve.openai import chat, completions
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.testing.scripted_text_engine import scripted_text_engine

MESSAGES = [{"role": "user", "content": "hello"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS_USAGE = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def to_json(value: msgspec.Struct) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(value), parse_constant=pytest.fail)


async def complete(text_engine, body: dict[str, Any]) -> dict[str, Any]:
    request = decode(json.dumps({"prompt": "hello"} | body).encode(), CompletionRequest)
    reply = to_json(await completions.complete(await completions.prepare(text_engine, request)))
    OpenAICompletion.model_validate(reply, strict=True)
    return reply


async def stream(text_engine, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"prompt": "hello", "stream": True} | body
    request = decode(json.dumps(body).encode(), CompletionRequest)
    job = await completions.prepare(text_engine, request)
    return [to_json(chunk) async for chunk in completions.stream(job)]


async def ask(text_engine, body: dict[str, Any]) -> dict[str, Any]:
    request = decode(json.dumps({"messages": MESSAGES} | body).encode(), ChatRequest)
    reply = to_json(await chat.complete(await chat.prepare(text_engine, request)))
    OpenAIChat.model_validate(reply, strict=True)
    return reply


async def ask_stream(text_engine, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "stream": True} | body
    job = await chat.prepare(text_engine, decode(json.dumps(body).encode(), ChatRequest))
    chunks = [to_json(chunk) async for chunk in chat.stream(job)]
    for chunk in chunks:
        OpenAIChunk.model_validate(chunk, strict=True)
    return chunks


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


async def test_a_completion_reply_has_the_expected_fields() -> None:
    reply = await complete(scripted_text_engine("he"), {"prompt": [1] * 20})
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("system_fingerprint").startswith("jaxserve-")
    assert isinstance(reply.pop("created"), int)
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "he",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 2,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_a_chat_reply_has_the_expected_fields() -> None:
    reply = await ask(scripted_text_engine("he"), {})
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("system_fingerprint").startswith("jaxserve-")
    assert isinstance(reply.pop("created"), int)
    usage = reply.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"content": "he", "role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }


async def test_completion_chunks_have_the_expected_bytes() -> None:
    text_engine = scripted_text_engine("hello é")
    body = {"prompt": [1, 2], "stop": ["!"], **USAGE}
    job = await completions.prepare(
        text_engine, decode(json.dumps(body).encode(), CompletionRequest), request_id="abc"
    )
    got = [msgspec.json.encode(chunk).decode() async for chunk in completions.stream(job)]
    head = (
        f'{{"id":"cmpl-abc","object":"text_completion","created":{job.created},"model":"tiny",'
        f'"system_fingerprint":"{text_engine.model.fingerprint}","choices":['
    )
    tail = '"logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    end = '"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
    usage = (
        '],"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    assert got == [
        head + '{"index":0,"text":"hello",' + tail,
        head + '{"index":0,"text":" ",' + tail,
        head + '{"index":0,"text":"é",' + tail,
        head + '{"index":0,"text":"",' + end,
        head + usage,
    ]


async def test_chat_chunks_have_the_expected_bytes() -> None:
    text_engine = scripted_text_engine("hello")
    body = {"messages": MESSAGES, "stream": True}
    job = await chat.prepare(
        text_engine, decode(json.dumps(body).encode(), ChatRequest), request_id="abc"
    )
    got = [msgspec.json.encode(chunk).decode() async for chunk in chat.stream(job)]
    head = (
        f'{{"id":"chatcmpl-abc","object":"chat.completion.chunk","created":{job.created},'
        f'"model":"tiny","system_fingerprint":"{text_engine.model.fingerprint}","choices":[{{"index":0,'
    )
    tail = '"logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    end = '"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
    assert got == [
        head + '"delta":{"role":"assistant","content":""},' + tail,
        head + '"delta":{"content":"hello"},' + tail,
        head + '"delta":{},' + end,
    ]


TEXTS = ["hello world", "é🔥x in", "end in the\nUs", "<think>a</think>b"]


@pytest.mark.parametrize("tokens_per_output", [1, 3])
@pytest.mark.parametrize("stop", [None, "\nUser:", "in", ["the", "x "], "Z" * 500])
@pytest.mark.parametrize("top", [None, 0, 3])
async def test_a_stream_equals_the_whole_reply(tokens_per_output, stop, top) -> None:
    for text in TEXTS:
        text_engine = scripted_text_engine(text, tokens_per_output=tokens_per_output)
        body = {"stop": stop, "temperature": 0}
        whole = await complete(text_engine, body | {"logprobs": top})
        chunks = await stream(text_engine, body | {"logprobs": top} | USAGE)
        assert_same(whole["choices"][0], choices_of(chunks), lambda c: c["text"])
        assert chunks[-1] == chunks[-1] | {"choices": [], "usage": whole["usage"]}

        logprobs = {} if top is None else {"logprobs": True, "top_logprobs": top}
        whole = await ask(text_engine, body | logprobs)
        chunks = await ask_stream(text_engine, body | logprobs | USAGE)
        whole["choices"][0]["text"] = whole["choices"][0]["message"]["content"]
        assert_same(
            whole["choices"][0], choices_of(chunks), lambda c: c["delta"].get("content", "")
        )
        assert chunks[-1] == chunks[-1] | {"choices": [], "usage": whole["usage"]}


def assert_same(whole: dict[str, Any], pieces: list[dict[str, Any]], text) -> None:
    assert "".join(map(text, pieces)) == whole["text"]
    assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == [whole["finish_reason"]]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    assert pieces[-1]["stop_reason"] == whole["stop_reason"]
    parts = [p["logprobs"] for p in pieces if p["logprobs"] is not None]
    if whole["logprobs"] is None:
        assert parts == []
        return
    for key, values in whole["logprobs"].items():
        assert [v for part in parts for v in part[key]] == values


async def test_the_other_fields_are_equal_in_all_chunks() -> None:
    for run in (stream, ask_stream):
        chunks = await run(scripted_text_engine("hello world"), USAGE | {"n": 2})
        for key in ("id", "created", "model", "object", "system_fingerprint"):
            assert len({chunk[key] for chunk in chunks}) == 1
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            assert {"index", "logprobs", "finish_reason"} <= choice.keys()
            assert "delta" in choice or "text" in choice


@pytest.mark.parametrize("run", [stream, ask_stream])
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": None}}]
)
async def test_usage_is_absent_unless_requested(run, options) -> None:
    chunks = await run(scripted_text_engine("hello"), options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    without_include = {"stream_options": {"continuous_usage_stats": True}}
    assert all(
        "usage" not in chunk for chunk in await run(scripted_text_engine("hello"), without_include)
    )


@pytest.mark.parametrize("run", [stream, ask_stream])
async def test_continuous_usage_counts_the_tokens_so_far(run) -> None:
    chunks = await run(scripted_text_engine("hello 🔥 world"), CONTINUOUS_USAGE)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (
        counts[-1]
        == counts[-2]
        == len(scripted_text_engine("").model.tokenizer.encode("hello 🔥 world")) + 1
    )
    if run is ask_stream:
        assert counts[0] == 0


async def test_the_role_appears_once_for_each_choice() -> None:
    chunks = await ask_stream(scripted_text_engine("hello", "he"), {"n": 2})
    for index in range(2):
        deltas = [c["delta"] for c in choices_of(chunks, index)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("streamed", [False, True])
async def test_choices_of_batches_and_n_keep_their_order(streamed) -> None:
    text_engine = scripted_text_engine("hello in the world", "he", "or", "in the")
    body = {"prompt": [[1] * 20, [8] * 40], "n": 2, "seed": 5, "max_tokens": 40}
    expected = ["hello in the world", "he", "or", "in the"]
    if streamed:
        chunks = await stream(text_engine, body | USAGE)
        assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
        texts = ["".join(c["text"] for c in choices_of(chunks, i)) for i in range(4)]
        ends = [[c for c in choices_of(chunks, i) if c["finish_reason"]] for i in range(4)]
        assert [len(e) for e in ends] == [1, 1, 1, 1]
        usage = chunks[-1]["usage"]
    else:
        reply = await complete(text_engine, body)
        assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
        texts, usage = [c["text"] for c in reply["choices"]], reply["usage"]
    assert texts == expected
    assert usage == {
        "prompt_tokens": 60,
        "completion_tokens": 6 + 2 + 2 + 3,
        "total_tokens": 60 + 13,
        "prompt_tokens_details": {"cached_tokens": 16 + 32},
    }


async def test_echo_puts_the_prompt_before_the_text_of_each_choice() -> None:
    for prompt, shown in (("hello ", "hello "), (["in", "or "], None), ([[256, 264]], "he world")):
        for n in (1, 2):
            body = {"prompt": prompt, "echo": True, "n": n}
            whole = await complete(scripted_text_engine("world"), body)
            chunks = await stream(scripted_text_engine("world"), body)
            for i, choice in enumerate(whole["choices"]):
                echoed = shown if shown is not None else prompt[i // n]
                assert choice["text"] == echoed + "world"
                assert "".join(c["text"] for c in choices_of(chunks, i)) == choice["text"]


@pytest.mark.parametrize("stop_string", ["STOP", "bin"])
async def test_a_stop_string_is_not_looked_for_in_the_echoed_prompt(stop_string) -> None:
    """Nor does it match where the prompt and the completion meet."""
    body = {"prompt": "Q: a STOP b", "stop": [stop_string], "echo": True, "max_tokens": 4}
    (choice,) = (await complete(scripted_text_engine("in the"), body))["choices"]
    assert choice["text"] == "Q: a STOP bin the"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    chunks = await stream(scripted_text_engine("in the"), body)
    assert "".join(c["text"] for c in choices_of(chunks)) == choice["text"]


async def test_completions_return_logprobs() -> None:
    text_engine = scripted_text_engine("hello é")
    top5 = (await complete(text_engine, {"logprobs": 5}))["choices"][0]["logprobs"]
    hello, world = "hello", "é".encode()
    assert top5["tokens"] == [hello, " ", f"\\x{world[0]:x}", f"\\x{world[1]:x}", "<|im_end|>"]
    assert top5["text_offset"] == [0, 5, 6, 10, 14]
    for token, logprob, top in zip(
        top5["tokens"], top5["token_logprobs"], top5["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (5, 6)
        assert min(top.values()) == -9999.0
    top0 = (await complete(text_engine, {"logprobs": 0}))["choices"][0]["logprobs"]
    assert [len(top) for top in top0["top_logprobs"]] == [1] * 5


@pytest.mark.parametrize("top", [0, 1, 5])
async def test_chats_return_logprobs(top) -> None:
    text_engine = scripted_text_engine("🔥ok")
    reply = await ask(text_engine, {"logprobs": True, "top_logprobs": top})
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"] == 7
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "🔥ok"
    assert content[-1]["token"] == "<|im_end|>"
    for entry in content:
        assert len(entry["top_logprobs"]) == top
        assert all(e["logprob"] >= -9999.0 for e in entry["top_logprobs"])
    same = await ask(text_engine, {"logprobs": True, "top_logprobs": None})
    assert len(same["choices"][0]["logprobs"]["content"]) == 7
    assert (await ask(text_engine, {"logprobs": False}))["choices"][0]["logprobs"] is None


async def test_tokens_with_equal_text_do_not_hide_each_other() -> None:
    # IDs from 272 on are not in the tokenizer and have no text.
    text_engine = scripted_text_engine([290])
    reply = await complete(text_engine, {"logprobs": 4})
    logprobs = reply["choices"][0]["logprobs"]
    top = logprobs["top_logprobs"][0]
    assert top[""] == logprobs["token_logprobs"][0]
    assert len(top) == 4
    assert max(top.values()) > top[""]
    assert all(name == "" or name.startswith("token_id:") for name in top)


async def test_special_tokens_show_on_request_and_added_tokens_always() -> None:
    text_engine = scripted_text_engine([97, 268, 270, 98])
    hidden = (await complete(text_engine, {"stop_token_ids": [98]}))["choices"][0]["text"]
    shown = await complete(text_engine, {"skip_special_tokens": False, "stop_token_ids": [98]})
    text = text_engine.model.tokenizer.decode([97, 268, 270], skip_special_tokens=False)
    assert shown["choices"][0]["text"] == text
    assert hidden == text.replace("<|im_start|>", "")


@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_replies_without_detokenizing_have_only_ids(tokens_per_output) -> None:
    ids_only = {"detokenize": False, "return_token_ids": True}
    template = "{{ messages[0].content }}{# <tool_call> <think> #}"
    for run, run_stream in ((complete, stream), (ask, ask_stream)):
        text_engine = scripted_text_engine(
            "<think>hello</think> world",
            tokens_per_output=tokens_per_output,
            chat_template=template,
        )
        (choice,) = (await run(text_engine, ids_only))["choices"]
        ids = [*text_engine.model.tokenizer.encode("<think>hello</think> world")]
        assert choice["token_ids"] == [*ids, text_engine.model.tokenizer.eos_token_id]
        assert choice["finish_reason"] == "stop"
        assert (choice.get("text") or choice.get("message", {}).get("content") or "") == ""
        pieces = choices_of(await run_stream(text_engine, ids_only))
        assert [i for piece in pieces for i in piece.get("token_ids", [])] == choice["token_ids"]
        assert not any(p.get("text") or p.get("delta", {}).get("content") for p in pieces)

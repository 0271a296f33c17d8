"""Tool calls and reasoning: replies and streams agree, and the openai client reads both."""

import json
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import chat
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.text.tokenizer import TokenTextCache

TEMPLATE = (
    "{% if tools %}tools{% for t in tools %}:{{ t.function.name }}{% endfor %} <tool_call>\n"
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %}<think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
BODY = {"messages": [{"role": "user", "content": "hello"}], "tools": [WEATHER, TIME]}


def make_text_engine(text: str, **options: Any) -> TextEngine:
    return scripted_text_engine(text, **{"chat_template": TEMPLATE} | options)


async def ask(text_engine: TextEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the first choice, after comparing reply and stream. Removes the IDs of calls."""
    request = decode(json.dumps(BODY | body).encode(), ChatRequest)
    reply = json.loads(
        msgspec.json.encode(await chat.complete(await chat.prepare(text_engine, request)))
    )
    OpenAIChat.model_validate(reply, strict=True)
    streamed = await stream(text_engine, body)
    assert len(streamed) == len(reply["choices"])
    for choice, other in zip(reply["choices"], streamed, strict=True):
        message = choice["message"]
        for call in message.get("tool_calls", []):
            assert call.pop("id")
            assert call["type"] == "function"
        assert other["content"] == (message["content"] or "")
        assert other["reasoning"] == message.get("reasoning", "")
        assert other["calls"] == [c["function"] for c in message.get("tool_calls", [])]
        assert other["finish_reason"] == choice["finish_reason"]
        assert other["logprobs"] == ((choice["logprobs"] or {}).get("content") or [])
    return reply["choices"][0]


async def stream(text_engine: TextEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = decode(json.dumps(BODY | body | {"stream": True}).encode(), ChatRequest)
    job = await chat.prepare(text_engine, request)
    joined_by_index: dict[int, dict[str, Any]] = {}
    sdk = ChatCompletionStreamState()
    async for chunk in chat.stream(job):
        data = json.loads(msgspec.json.encode(chunk))
        sdk.handle_chunk(OpenAIChunk.model_validate(data, strict=True))
        for choice in data["choices"]:
            joined = joined_by_index.setdefault(
                choice["index"],
                {"content": "", "reasoning": "", "calls": [], "finish_reason": None, "ids": set()}
                | {"logprobs": []},
            )
            read_delta(joined, choice["delta"])
            joined["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            assert joined["finish_reason"] is None
            joined["finish_reason"] = choice["finish_reason"]
    final = sdk.current_completion_snapshot
    for choice in final.choices:
        calls = [
            {"name": c.function.name, "arguments": c.function.arguments}
            for c in choice.message.tool_calls or []
        ]
        assert calls == joined_by_index[choice.index]["calls"]
    return [joined_by_index[i] for i in sorted(joined_by_index)]


def read_delta(joined: dict[str, Any], delta: dict[str, Any]) -> None:
    assert None not in delta.values()
    joined["content"] += delta.get("content", "")
    joined["reasoning"] += delta.get("reasoning", "")
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for call in delta.get("tool_calls", []):
        function = call["function"]
        if call["index"] == len(joined["calls"]):
            assert list(call) == ["index", "id", "type", "function"]
            assert call["type"] == "function"
            assert call["id"] not in joined["ids"]
            joined["ids"].add(call["id"])
            joined["calls"].append({"name": function["name"], "arguments": ""})
        else:
            assert call.keys() == {"index", "function"}
            assert function.keys() == {"arguments"}
        joined["calls"][call["index"]]["arguments"] += function["arguments"]


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_calls_are_parsed(size) -> None:
    text_engine = make_text_engine(f"Let me see. {CALL}\n{CALL_TIME}", tokens_per_output=size)
    choice = await ask(text_engine, {"logprobs": True, "n": 2})
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [
        {"name": "weather", "arguments": ARGUMENTS},
        {"name": "time", "arguments": "{}"},
    ]


async def test_a_message_with_only_calls_has_no_content() -> None:
    choice = await ask(make_text_engine(CALL), {})
    assert choice["message"]["content"] is None
    assert "reasoning" not in choice["message"]
    choice = await ask(make_text_engine("hello"), {})
    assert choice["message"].keys() == {"content", "role", "refusal"}
    assert choice["finish_reason"] == "stop"


async def test_only_the_first_call_counts_without_parallel_calls() -> None:
    choice = await ask(make_text_engine(CALL + CALL_TIME), {"parallel_tool_calls": False})
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arg',
        "Sure <tool_c",
        "<tool_call>weather</tool_call>",
    ],
)
async def test_invalid_calls_are_content(text) -> None:
    choice = await ask(make_text_engine(text), {})
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_a_truncated_call_does_not_set_the_finish_reason() -> None:
    choice = await ask(make_text_engine(CALL), {"max_tokens": 50})
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    choice = await ask(make_text_engine(CALL[:55]), {})
    assert choice["finish_reason"] == "stop"


async def test_stop_strings_end_content_but_not_calls() -> None:
    choice = await ask(make_text_engine(CALL + " the end, really"), {"stop": ["Z", ","]})
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert choice["message"]["content"].strip() == "the end"
    assert choice["stop_reason"] == ","
    assert choice["finish_reason"] == "tool_calls"


async def test_the_prompt_shows_tools_unless_the_tool_choice_is_none() -> None:
    text_engine = make_text_engine(CALL)
    for choice, shown in (("auto", True), (None, True), ("none", False)):
        await ask(text_engine, {"tool_choice": choice})
        ids = text_engine.engine.submitted[-1].prompt_token_ids
        prompt = text_engine.model.tokenizer.decode(ids)
        assert prompt.startswith("tools:weather:time") is shown
    reply = await ask(text_engine, {"tool_choice": "none"})
    assert reply["message"]["content"] == CALL
    assert reply["finish_reason"] == "stop"


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_calls_are_content_without_tools(tools, choice) -> None:
    text_engine = make_text_engine(CALL)
    reply = await ask(text_engine, {"tools": tools, "tool_choice": choice})
    assert reply["message"]["content"] == CALL
    ids = text_engine.engine.submitted[-1].prompt_token_ids
    assert text_engine.model.tokenizer.decode(ids).startswith("user")


async def test_rejects_tools_without_a_tool_call_parser() -> None:
    text_engine = make_text_engine("hello", tool_call_parser="none")
    with pytest.raises(InvalidRequestError, match="--tool-call-parser") as caught:
        await ask(text_engine, {})
    assert caught.value.param == "tools"
    assert (await ask(text_engine, {"tool_choice": "none"}))["message"]["content"] == "hello"
    with pytest.raises(ConfigError, match="hermes"):
        make_text_engine("hello", tool_call_parser="nope")
    with pytest.raises(ConfigError, match="qwen3"):
        make_text_engine("hello", reasoning_parser="nope")


async def test_mistral_calls_have_ids_of_nine_characters() -> None:
    text_engine = make_text_engine(
        '[TOOL_CALLS][{"name": "time", "arguments": {}}]', tool_call_parser="mistral"
    )
    request = decode(json.dumps(BODY).encode(), ChatRequest)
    reply = await chat.complete(await chat.prepare(text_engine, request))
    (call,) = reply.choices[0].message.tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize("kwargs", [{}, {"think": True}])
async def test_reasoning_has_two_names_and_can_be_omitted(kwargs) -> None:
    text = "hmm\nhe</think>\n\nhello " + CALL
    text_engine = make_text_engine(text if kwargs else "<think>\n" + text)
    choice = await ask(text_engine, {"chat_template_kwargs": kwargs, "logprobs": True})
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hmm\nhe"
    assert message["content"] == "hello"
    assert choice["finish_reason"] == "tool_calls"
    tokens = text_engine.engine.submitted[-1]
    assert len(choice["logprobs"]["content"]) > 40
    assert tokens.params.stop == ()
    choice = await ask(text_engine, {"chat_template_kwargs": kwargs, "include_reasoning": False})
    assert choice["message"].keys() == {"content", "role", "refusal", "tool_calls"}


async def test_think_tags_may_be_special_tokens() -> None:
    text_engine = make_text_engine("<think>hello</think>world")
    think = [text_engine.model.tokenizer.encode(tag)[0] for tag in ("<think>", "</think>")]
    text_engine.model.tokenizer.special_ids |= set(think)
    text_engine.model.tokenizer._visible = TokenTextCache(
        text_engine.model.tokenizer.token_bytes, text_engine.model.tokenizer.special_ids
    )
    choice = await ask(text_engine, {"tools": None})
    assert choice["message"]["reasoning"] == "hello"
    assert choice["message"]["content"] == "world"


async def test_a_completion_may_consist_of_reasoning_only() -> None:
    choice = await ask(
        make_text_engine("<think>hello"), {"max_tokens": 2, "tools": None, "stop": "l"}
    )
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"] == "hello"
    assert choice["finish_reason"] == "length"
    choice = await ask(make_text_engine("<think>he", reasoning_parser="none"), {"tools": None})
    assert choice["message"]["content"] == "<think>he"

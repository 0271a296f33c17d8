"""Replies and streams of /v1/responses agree, and the openai client reads both."""

import json
from typing import Any

import msgspec
import pydantic
import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import responses
from jaxserve.openai.decoding import decode
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.testing.scripted_text_engine import scripted_text_engine

TEMPLATE = (
    "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} <- {{ m.tool_call_id }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{# <tool_call> <think> #}"
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def make_text_engine(text: str, **options: Any) -> TextEngine:
    return scripted_text_engine(text, **({"chat_template": TEMPLATE} | options))


def request_of(body: dict[str, Any]) -> ResponsesRequest:
    return decode(json.dumps({"input": "hello"} | body).encode(), ResponsesRequest)


def to_json(value: msgspec.Struct) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(value))


def without_ids(value: Any) -> Any:
    """Returns a value without the fields that differ between runs."""
    if isinstance(value, list):
        return [without_ids(v) for v in value]
    if isinstance(value, dict):
        changing = {"id", "call_id", "item_id", "created_at"}
        return {k: without_ids(v) for k, v in value.items() if k not in changing}
    return value


async def ask(text_engine: TextEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole reply, after comparing it with the result of a stream."""
    request = request_of(body)
    reply = to_json(await responses.complete(await responses.prepare(text_engine, request)))
    OpenAIResponse.model_validate(reply, strict=True)
    events = await stream(text_engine, body)
    assert without_ids(events[-1]["response"]) == without_ids(reply)
    return reply


async def stream(text_engine: TextEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream, after checking their order and contents."""
    prepared = await responses.prepare(text_engine, request_of(body | {"stream": True}))
    events = [to_json(event) async for event in responses.stream(prepared)]
    for event in events:
        EVENT.validate_python(event, strict=True)
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    built: list[dict[str, Any]] = []
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            built.append({"item": event["item"], "text": "", "parts": 0, "done": False})
            assert event["item"]["status"] == "in_progress"
        current = built[-1]
        assert event["output_index"] == len(built) - 1
        assert event.get("item_id", current["item"]["id"]) == current["item"]["id"]
        assert not current["done"]
        if kind == "content_part.added":
            current["parts"] += 1
        elif kind.endswith(".delta"):
            assert current["parts"] == (0 if "arguments" in kind else 1)
            current["text"] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == current["text"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == current["text"]
        elif kind == "output_item.done":
            current["done"] = True
            assert event["item"] == events[-1]["response"]["output"][len(built) - 1]
            assert event["item"]["id"] == current["item"]["id"]
    assert all(item["done"] for item in built)


async def test_the_stream_of_a_text_has_the_expected_events() -> None:
    events = await stream(make_text_engine("hello world"), {})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["output"] == []


async def test_a_reply_has_the_expected_fields() -> None:
    body = {"instructions": "be", "metadata": {"a": "b"}, "temperature": 0.5, "store": True}
    reply = await ask(make_text_engine("hello"), body)
    assert reply["id"].startswith("resp_")
    assert reply["object"] == "response"
    assert reply["status"] == "completed"
    assert reply["store"] is False
    assert reply["instructions"] == "be"
    assert reply["metadata"] == {"a": "b"}
    assert reply["temperature"] == 0.5
    assert reply["text"]["format"] == {"type": "text"}
    assert OpenAIResponse.model_validate(reply).output_text == "hello"
    (item,) = reply["output"]
    assert without_ids(item) == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }
    usage = reply["usage"]
    assert usage["output_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + 2


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_reasoning_text_and_calls_become_items(size) -> None:
    text_engine = make_text_engine(f"<think>hmm</think>hello {CALL}{CALL}", tokens_per_output=size)
    reply = await ask(text_engine, {"tools": [TOOL, {"type": "web_search"}]})
    thought, message, first, second = reply["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert message["content"][0]["text"] == "hello"
    for call in (first, second):
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
        assert call["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]
    assert reply["status"] == "completed"
    assert [tool["name"] for tool in reply["tools"]] == ["f"]
    assert 0 < reply["usage"]["output_tokens_details"]["reasoning_tokens"] < 8


async def test_a_request_may_have_tools_and_a_format() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body = {"tools": [TOOL], "text": {"format": form}}
    for text, kind in ((CALL, "function_call"), ('{"a": 1}', "message")):
        text_engine = make_text_engine("<think>hmm</think>" + text)
        reply = await ask(text_engine, body)
        assert [item["type"] for item in reply["output"]] == ["reasoning", kind]
        grammar = text_engine.engine.submitted[-1].params.grammar
        assert json.loads(grammar.spec) == form["schema"]
        assert "(@content | calls)" in grammar.structural_tag


async def test_a_truncated_completion_is_incomplete() -> None:
    reply = await ask(make_text_engine("hello world"), {"max_output_tokens": 1})
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][0]["status"] == "incomplete"
    assert reply["max_output_tokens"] == 1
    events = await stream(make_text_engine("hello world"), {"max_output_tokens": 1})
    assert events[-1]["type"] == "response.incomplete"


async def test_an_empty_completion_has_an_item() -> None:
    reply = await ask(make_text_engine(""), {})
    assert reply["output"][0]["content"][0]["text"] == ""


async def test_logprobs_are_in_the_part_of_their_text() -> None:
    for body in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        reply = await ask(make_text_engine("hello é"), body)
        entries = reply["output"][0]["content"][0]["logprobs"]
        assert (
            "".join(bytes(e["bytes"]).decode("latin-1") for e in entries[:4])
            .encode("latin-1")
            .decode()
            == "hello é"
        )
        assert {len(e["top_logprobs"]) for e in entries} == {body.get("top_logprobs", 0)}


async def rendered(text_engine: TextEngine, body: dict[str, Any]) -> list[str]:
    await responses.complete(await responses.prepare(text_engine, request_of(body)))
    ids = text_engine.engine.submitted[-1].prompt_token_ids
    return text_engine.model.tokenizer.decode(ids).splitlines()


async def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
    ]
    text_engine = make_text_engine("hello")
    assert await rendered(text_engine, {"input": items, "instructions": "i", "tools": [TOOL]}) == [
        "tool f",
        "system: i",
        "",
        "d",
        "user: u",
        'assistant: a (hm) c1 f {"x": 1} c2 f {}',
        "tool: one <- c1",
        "tool: two <- c2",
    ]
    assert await rendered(text_engine, {"instructions": "i"}) == ["system: i", "user: hello"]
    assert await rendered(text_engine, {"tools": [TOOL], "tool_choice": "none"}) == ["user: hello"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "foo", "content": "x"}]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": "hello " * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "foo"}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
async def test_errors_name_the_field(body, param) -> None:
    text_engine = make_text_engine("hello")
    with pytest.raises(InvalidRequestError) as caught:
        await responses.prepare(text_engine, request_of(body))
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


async def test_an_error_in_a_stream_is_the_last_event() -> None:
    text_engine = make_text_engine("hello world")
    text_engine.engine.fail_after = 1
    prepared = await responses.prepare(text_engine, request_of({}))
    events = [to_json(event) async for event in responses.stream(prepared)]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "told to fail" in events[-1]["response"]["error"]["message"]
    EVENT.validate_python(events[-1], strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

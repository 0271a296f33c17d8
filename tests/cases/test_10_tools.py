"""Tool calls and structured output.

After a token without a successor in a script, all tokens are equally likely.
"""

import enum
import json
import re
from typing import Any

import pydantic
import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import CONTENT_TEMPLATE, EOS, EOS_ID

STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True])
TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }},{% endfor %}"
    "{% endif %}" + CONTENT_TEMPLATE
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}
ENUM = ["é", "🔥", 'a"b', "\u2028"]


@pytest.fixture(scope="module")
def server(serve, scripted_checkpoint):
    return serve(
        scripted_checkpoint(
            call=["<tool_call>", '{"name": "f", ', '"arguments": ', '{"a": ', "1}}"]
            + ["</tool_call>", EOS],
            array=['[{"name"', ': "f", ', '"parameters"', ': {"a"', ": 1", "}}", "]", EOS],
            object=['{"a":', " 2", "} ", EOS],
            prose=["Let", " me", " think", ".", EOS],
            broken=["<tool", "_call>", '{"name": "f"', ", oops", " </tool_call> ", EOS],
            unknown=["<tool_", "call>", '{"name": "h", "arg', 'uments": {}}', "</tool_ca", "ll>"]
            + [EOS],
            numbers=[f"{i}," for i in range(60)],
            one=['{"a": 1', "}", " and", " more", " text"],
            long=['{"k"', ': "b', 'c", ', '"d": 5}'],
            end=[EOS],
            options={"tokenizer_config": {"chat_template": TEMPLATE}},
        )
    ).with_one_token_per_output()


def chat_body(start: str, **more: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": f"<{start}>"}], "max_tokens": 60}
    return {**request, "temperature": 0, **more}


def chat(server, start: str, **more: Any) -> dict[str, Any]:
    """Returns the only choice, and asserts that the openai client reads the same from a stream."""
    request = chat_body(start, **more)
    reply = server.post(CHAT, request)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    sdk = ChatCompletionStreamState()
    for chunk in server.stream(CHAT, request).chunks:
        sdk.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    (streamed,) = sdk.current_completion_snapshot.choices
    assert streamed.finish_reason == choice["finish_reason"]
    assert (streamed.message.content or "") == (choice["message"]["content"] or "")
    called = [
        (call.type, call.function.name, call.function.arguments)
        for call in streamed.message.tool_calls or []
    ]
    assert called == [
        (call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or []
    ]
    return choice


def prompt_of(server, **more: Any) -> list[int]:
    reply = server.post(CHAT, chat_body("prose", return_token_ids=True, **more)).json()
    return reply["prompt_token_ids"]


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
@pytest.mark.parametrize("tools", [None, [], [OTHER]])
@STREAM_OR_NOT
def test_js_144_a_tool_choice_without_a_matching_tool_is_refused(
    server, tools, tool_choice, stream
) -> None:
    request = chat_body("prose", tool_choice=tool_choice, stream=stream)
    if tools is not None:
        request["tools"] = tools
    if tools == [OTHER] and tool_choice == "required":
        assert server.post(CHAT, request).status_code == 200
    else:
        assert server.refused(CHAT, request)["param"] == "tool_choice"


@pytest.mark.parametrize(
    "choice_field", [{}, *({"tool_choice": c} for c in (None, "auto", "none"))]
)
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_js_145_null_or_empty_tools_mean_no_tools(server, tools, choice_field) -> None:
    result = chat(server, "prose", **tools, **choice_field)
    assert result["message"]["content"] == "Let me think."
    assert result["finish_reason"] == "stop"
    assert not result["message"].get("tool_calls")
    plain = prompt_of(server)
    assert prompt_of(server, **tools, **choice_field) == plain
    assert prompt_of(server, tools=[TOOL]) != plain
    assert prompt_of(server, tools=[TOOL], tool_choice="none") == plain


@pytest.mark.parametrize(
    "tool_choice",
    ["foo", 5, {"type": "function"}, {"type": "x", "function": {"name": "f"}}, [], {}, True]
    + [{"type": "function", "function": {}}, {"type": "function", "function": {"name": 5}}, ""],
)
@STREAM_OR_NOT
def test_js_146_invalid_tool_choices_are_refused(server, tool_choice, stream) -> None:
    request = chat_body("prose", tools=[TOOL], tool_choice=tool_choice, stream=stream)
    error = server.refused(CHAT, request)
    assert error["param"] == "tool_choice"
    assert "'required'" in error["message"]


@pytest.mark.parametrize("tool_choice", ["auto", None])
def test_js_146_tools_need_a_tool_call_parser(serve, scripted_checkpoint, tool_choice) -> None:
    server = serve(scripted_checkpoint(ab=["A", "B", EOS]), max_body_mib=2)
    request = chat_body("ab", tools=[TOOL], tool_choice=tool_choice)
    assert "--tool-call-parser" in server.refused(CHAT, request)["message"]


CALLS = [("call", "auto", "1"), ("array", "required", "1"), ("object", NAMED, "2")]
ONE_CALL = {"parallel_tool_calls": False}


@pytest.mark.parametrize(("start", "tool_choice", "value"), CALLS)
def test_js_147_the_finish_reason_of_a_call_is_tool_calls(
    server, start, tool_choice, value
) -> None:
    result = chat(server, start, tools=[TOOL, OTHER], tool_choice=tool_choice, **ONE_CALL)
    assert result["finish_reason"] == "tool_calls"
    (call,) = result["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"a": int(value)}
    assert result["message"]["content"] is None
    for count in range(1, 5):
        more = {"tool_choice": tool_choice, "max_tokens": count, **ONE_CALL}
        cut = chat(server, start, tools=[TOOL, OTHER], **more)
        if start != "object" or count < 3:
            assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(("start", "tool_choice", "value"), CALLS)
def test_js_148_a_call_is_streamed_in_pieces(server, start, tool_choice, value) -> None:
    request = chat_body(start, tools=[TOOL], tool_choice=tool_choice, **ONE_CALL)
    deltas = [piece["delta"] for piece in server.stream(CHAT, request).choices()]
    first, *later = (call for delta in deltas for call in delta.get("tool_calls") or [])
    assert first["index"] == 0
    assert first["id"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "f"
    arguments = first["function"].get("arguments", "")
    for piece in later:
        assert piece.keys() == {"index", "function"}
        assert piece["index"] == 0
        assert piece["function"].keys() == {"arguments"}
        arguments += piece["function"]["arguments"]
    assert len(later) > 1
    assert json.loads(arguments) == {"a": int(value)}
    (choice,) = server.post(CHAT, request).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("prose", "Let me think."),
        ("broken", '<tool_call>{"name": "f", oops </tool_call> '),
        ("unknown", '<tool_call>{"name": "h", "arguments": {}}</tool_call>'),
    ],
)
def test_js_150_text_that_is_not_a_call_is_content(server, start, text) -> None:
    result = chat(server, start, tools=[TOOL])
    assert result["message"]["content"] == text
    assert result["finish_reason"] == "stop"
    assert not result["message"].get("tool_calls")


@pytest.mark.parametrize("start", ["prose", "broken", "unknown", "end"])
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_js_150_a_required_call_is_forced(server, start, tool_choice) -> None:
    result = chat(server, start, tools=[TOOL], tool_choice=tool_choice, max_tokens=200, **ONE_CALL)
    assert result["finish_reason"] == "tool_calls"
    (call,) = result["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def test_js_151_invalid_formats_are_refused(server) -> None:
    formats = [
        {"type": "foo"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "s"}},
        {"type": "json_schema", "json_schema": "s"},
        {},
        "json_object",
        *map(
            schema_format,
            [
                {"type": "not-a-type"},
                {"type": "string", "pattern": "("},
                {"type": "string", "pattern": "[z-a]"},
                {"$ref": "#/$defs/missing"},
                {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}, "required": ["a"]},
                {"type": "integer", "minimum": 3, "maximum": 2},
                {"type": 5},
                {"properties": []},
                {"enum": []},
                True,
                [],
                "x",
                None,
            ],
        ),
    ]
    request = chat_body("numbers", stream=True, max_tokens=60)
    with server.http.stream("POST", CHAT, json=request) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        for value in formats:
            for stream in (False, True):
                bad = chat_body("one", response_format=value, stream=stream)
                error = server.refused(CHAT, bad)
                assert error["param"].partition(".")[0] == "response_format", value
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [c["delta"].get("content") or "" for chunk in rest for c in chunk["choices"]]
    assert "".join(pieces).endswith("57,58,59,")
    for guided in ({"regex": "("}, {"json": "{"}, {"choice": []}, {"grammar": "start: ("}):
        error = server.refused(COMPLETIONS, {"prompt": "x", "structured_outputs": guided})
        assert error["param"].partition(".")[0] == "structured_outputs"


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(pydantic.BaseModel):
    color: Color
    on: bool


class Outer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    left: Inner
    right: Inner | None
    colors: tuple[Color, Color]


class Node(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: int
    next: "Node | None"


@pytest.mark.parametrize("model", [Outer, Node])
def test_js_152_references_in_schemas_are_followed(server, model) -> None:
    schema = model.model_json_schema()
    assert "$defs" in schema
    if model is Outer:
        schema["$defs"]["Inner"]["additionalProperties"] = False
    reply = server.chat(
        "a", response_format=schema_format(schema), n=8, temperature=1, seed=1, max_tokens=200
    )
    texts = [
        choice["message"]["content"]
        for choice in reply["choices"]
        if choice["finish_reason"] == "stop"
    ]
    assert len(texts) >= 4
    assert len(set(texts)) > 1
    for text in texts:
        model.model_validate_json(text)


FLAT = {
    "type": "object",
    "properties": {"a": {"enum": ["x y", "z"]}, "b": {"type": "array", "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("value", [{"type": "json_object"}, schema_format(FLAT)])
@pytest.mark.parametrize("favoured", [" ", "\n", " \n\t", " \n\t\r"])
def test_js_154_white_space_is_bounded(server, value, favoured) -> None:
    # Prefers white space, then characters that close a value.
    bias = {server.tokenizer.encode(c)[0]: 100 for c in favoured}
    bias |= {server.tokenizer.encode(c)[0]: 30 for c in '}]"'}
    more = {"logit_bias": {str(i): b for i, b in bias.items()}, "max_tokens": 200}
    reply = server.chat("a", response_format=value, temperature=0, **more)
    (choice,) = reply["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop", text
    assert isinstance(json.loads(text), dict)
    runs = re.findall(r"\s+", text)
    assert runs, "the bias must have an effect"
    assert max(map(len, runs)) <= 32


@pytest.mark.parametrize(
    "value", [schema_format(PARAMETERS), schema_format(FLAT), {"type": "json_object"}]
)
def test_js_155_the_completion_does_not_end_inside_the_json(server, value) -> None:
    bias = {str(EOS_ID): 100}
    # Otherwise strings and lists would not end.
    bias |= {str(server.tokenizer.encode(c)[0]): 50 for c in '"]}'}
    for start in ("end", "prose"):
        result = chat(server, start, response_format=value, logit_bias=bias, max_tokens=200)
        assert result["finish_reason"] == "stop"
        parsed = json.loads(result["message"]["content"])
        if value == schema_format(PARAMETERS):
            assert parsed in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("value", [schema_format(PARAMETERS), {"type": "json_object"}])
def test_js_155_nothing_follows_the_json(server, value) -> None:
    free = chat(server, "one", max_tokens=6)
    assert free["message"]["content"] == '{"a": 1} and more text text'
    result = chat(server, "one", response_format=value)
    assert result["message"]["content"] == '{"a": 1}'
    assert result["finish_reason"] == "stop"
    if value["type"] == "json_schema":
        result = chat(server, "one", response_format=value, ignore_eos=True, min_tokens=5)
        assert json.loads(result["message"]["content"]) == {"a": 1}


def test_js_155_with_tools_the_completion_is_a_call_or_json(server) -> None:
    response_format = schema_format(PARAMETERS)
    more = {"tools": [TOOL], "response_format": response_format, "parallel_tool_calls": False}
    result = chat(server, "call", **more)
    assert result["finish_reason"] == "tool_calls"
    assert not result["message"]["content"]
    (call,) = result["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
    result = chat(server, "object", **more)
    assert result["finish_reason"] == "stop"
    assert not result["message"].get("tool_calls")
    assert json.loads(result["message"]["content"]) == {"a": 2}


@pytest.mark.parametrize(("count", "text"), [(3, '{"k": "bc", '), (2, '{"k": "b'), (1, '{"k"')])
def test_js_156_json_is_cut_off_at_max_tokens(server, count, text) -> None:
    more = {"response_format": {"type": "json_object"}, "max_tokens": count}
    result = chat(server, "long", **more)
    assert result["finish_reason"] == "length"
    assert result["message"]["content"] == text
    whole = chat(server, "long", **{**more, "max_tokens": 20})
    assert whole["finish_reason"] == "stop"
    assert json.loads(whole["message"]["content"]) == {"k": "bc", "d": 5}


def structured(server, schema: Any, **more: Any) -> list[Any]:
    """Returns the JSON value of every choice, and asserts that a stream has the same text."""
    request = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": schema_format(schema),
        "temperature": 1,
        "seed": 2,
        "max_tokens": 120,
        **more,
    }
    choices = server.post(CHAT, request).json()["choices"]
    streamed = server.stream(CHAT, request)
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert streamed.text(choice["index"]) == choice["message"]["content"]
    return [json.loads(choice["message"]["content"]) for choice in choices]


def test_js_158_strings_may_have_any_unicode_character(server) -> None:
    found = structured(server, {"enum": ENUM}, n=16)
    assert set(found) <= set(ENUM)
    assert len(set(found)) > 1
    for value in [*ENUM, 'tab\t"quote" \\ \u0000', "e\u0301", "\U0010ffff"]:
        assert structured(server, {"const": value}) == [value]
    names = ["größe", "🔥", "名 前"]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [1, 2]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    (parsed,) = structured(server, schema)
    assert list(parsed) == names
    assert set(parsed.values()) <= {1, 2}

"""Calls of tools, and answers that must have a form.

After tokens that no script goes on from, all tokens are as likely, as in a random model.
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

STREAM = pytest.mark.parametrize("stream", [False, True])
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
def server(serve, script):
    return serve(
        script(
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
    ).one_token_at_a_time()


def chat_body(start: str, **more: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": f"<{start}>"}], "max_tokens": 60}
    return {**request, "temperature": 0, **more}


def ask(server, start: str, **more: Any) -> dict[str, Any]:
    """The choice, which must be what the openai client makes of the stream."""
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


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("tools", [None, [], [OTHER]])
@STREAM
def test_js_144_a_choice_that_the_tools_do_not_have(server, tools, choice, stream) -> None:
    request = chat_body("prose", tool_choice=choice, stream=stream)
    if tools is not None:
        request["tools"] = tools
    if tools == [OTHER] and choice == "required":
        assert server.post(CHAT, request).status_code == 200
    else:
        assert server.refused(CHAT, request)["param"] == "tool_choice"


@pytest.mark.parametrize("choice", [{}, *({"tool_choice": c} for c in (None, "auto", "none"))])
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_js_145_no_tools_are_no_tools(server, tools, choice) -> None:
    got = ask(server, "prose", **tools, **choice)
    assert got["message"]["content"] == "Let me think."
    assert got["finish_reason"] == "stop"
    assert not got["message"].get("tool_calls")
    plain = prompt_of(server)
    assert prompt_of(server, **tools, **choice) == plain
    assert prompt_of(server, tools=[TOOL]) != plain
    assert prompt_of(server, tools=[TOOL], tool_choice="none") == plain


@pytest.mark.parametrize(
    "choice",
    ["foo", 5, {"type": "function"}, {"type": "x", "function": {"name": "f"}}, [], {}, True]
    + [{"type": "function", "function": {}}, {"type": "function", "function": {"name": 5}}, ""],
)
@STREAM
def test_js_146_a_choice_that_is_none(server, choice, stream) -> None:
    request = chat_body("prose", tools=[TOOL], tool_choice=choice, stream=stream)
    error = server.refused(CHAT, request)
    assert error["param"] == "tool_choice"
    assert "'required'" in error["message"]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, None])
def test_js_146_a_model_without_a_form_for_calls(serve, script, choice) -> None:
    server = serve(script(ab=["A", "B", EOS]), max_body_mib=2)
    request = chat_body("ab", tools=[TOOL], tool_choice=choice)
    assert "--tool-call-parser" in server.refused(CHAT, request)["message"]


CALLS = [("call", "auto", "1"), ("array", "required", "1"), ("object", NAMED, "2")]
ONE_CALL = {"parallel_tool_calls": False}


@pytest.mark.parametrize(("start", "choice", "value"), CALLS)
def test_js_147_calls_end_with_tool_calls(server, start, choice, value) -> None:
    got = ask(server, start, tools=[TOOL, OTHER], tool_choice=choice, **ONE_CALL)
    assert got["finish_reason"] == "tool_calls"
    (call,) = got["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"a": int(value)}
    assert got["message"]["content"] is None
    for count in range(1, 5):
        more = {"tool_choice": choice, "max_tokens": count, **ONE_CALL}
        cut = ask(server, start, tools=[TOOL, OTHER], **more)
        if start != "object" or count < 3:
            assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(("start", "choice", "value"), CALLS)
def test_js_148_pieces_of_calls(server, start, choice, value) -> None:
    request = chat_body(start, tools=[TOOL], tool_choice=choice, **ONE_CALL)
    deltas = [choice["delta"] for choice in server.stream(CHAT, request).choices()]
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
    (whole,) = server.post(CHAT, request).json()["choices"]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("prose", "Let me think."),
        ("broken", '<tool_call>{"name": "f", oops </tool_call> '),
        ("unknown", '<tool_call>{"name": "h", "arguments": {}}</tool_call>'),
    ],
)
def test_js_150_what_is_no_call_is_content(server, start, text) -> None:
    got = ask(server, start, tools=[TOOL])
    assert got["message"]["content"] == text
    assert got["finish_reason"] == "stop"
    assert not got["message"].get("tool_calls")


@pytest.mark.parametrize("start", ["prose", "broken", "unknown", "end"])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_js_150_a_required_call_is_made(server, start, choice) -> None:
    got = ask(server, start, tools=[TOOL], tool_choice=choice, max_tokens=200, **ONE_CALL)
    assert got["finish_reason"] == "tool_calls"
    (call,) = got["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def test_js_151_formats_that_are_none(server) -> None:
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
def test_js_152_schemas_with_references(server, model) -> None:
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
@pytest.mark.parametrize("favourites", [" ", "\n", " \n\t", " \n\t\r"])
def test_js_154_white_space_is_bounded(server, value, favourites) -> None:
    # White space wherever it may be, and ends rather than beginnings.
    bias = {server.tokenizer.encode(c)[0]: 100 for c in favourites}
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
def test_js_155_no_end_before_the_end(server, value) -> None:
    bias = {str(EOS_ID): 100}
    # Strings and lists would have no end otherwise.
    bias |= {str(server.tokenizer.encode(c)[0]): 50 for c in '"]}'}
    for start in ("end", "prose"):
        got = ask(server, start, response_format=value, logit_bias=bias, max_tokens=200)
        assert got["finish_reason"] == "stop"
        parsed = json.loads(got["message"]["content"])
        if value == schema_format(PARAMETERS):
            assert parsed in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("value", [schema_format(PARAMETERS), {"type": "json_object"}])
def test_js_155_nothing_after_the_end(server, value) -> None:
    free = ask(server, "one", max_tokens=6)
    assert free["message"]["content"] == '{"a": 1} and more text text'
    got = ask(server, "one", response_format=value)
    assert got["message"]["content"] == '{"a": 1}'
    assert got["finish_reason"] == "stop"
    if value["type"] == "json_schema":
        got = ask(server, "one", response_format=value, ignore_eos=True, min_tokens=5)
        assert json.loads(got["message"]["content"]) == {"a": 1}


def test_js_155_with_tools_the_answer_is_a_call_or_the_text(server) -> None:
    form = schema_format(PARAMETERS)
    more = {"tools": [TOOL], "response_format": form, "parallel_tool_calls": False}
    got = ask(server, "call", **more)
    assert got["finish_reason"] == "tool_calls"
    assert not got["message"]["content"]
    (call,) = got["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
    got = ask(server, "object", **more)
    assert got["finish_reason"] == "stop"
    assert not got["message"].get("tool_calls")
    assert json.loads(got["message"]["content"]) == {"a": 2}


@pytest.mark.parametrize(("count", "text"), [(3, '{"k": "bc", '), (2, '{"k": "b'), (1, '{"k"')])
def test_js_156_json_that_was_cut(server, count, text) -> None:
    more = {"response_format": {"type": "json_object"}, "max_tokens": count}
    got = ask(server, "long", **more)
    assert got["finish_reason"] == "length"
    assert got["message"]["content"] == text
    whole = ask(server, "long", **{**more, "max_tokens": 20})
    assert whole["finish_reason"] == "stop"
    assert json.loads(whole["message"]["content"]) == {"k": "bc", "d": 5}


def structured(server, schema: Any, **more: Any) -> list[Any]:
    """What the answers say, streamed or not."""
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


def test_js_158_text_beyond_ascii(server) -> None:
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

"""Grammars in requests: every field, invalid values, forced calls and structural tags."""

import json
from typing import Any

import msgspec
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai import responses
from jaxserve.openai.decoding import decode
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.sampling_params import Grammar
from jaxserve.testing.openai_calls import ask, complete
from jaxserve.testing.scripted_text_engine import scripted_text_engine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{# <tool_call> <think> #}"
)


def make_text_engine(
    text: str = "hello", *, template: str = TEMPLATE, **options: Any
) -> TextEngine:
    return scripted_text_engine(text, chat_template=template, **options)


def grammar_of(text_engine: TextEngine) -> Grammar | None:
    """Returns the grammar that reached the engine, without its structural tag."""
    grammar = text_engine.engine.submitted[-1].params.grammar
    return grammar and msgspec.structs.replace(grammar, structural_tag="")


def tag_of(text_engine: TextEngine) -> str:
    return text_engine.engine.submitted[-1].params.grammar.structural_tag


FORMS = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    (
        {"structured_outputs": {"json": '{"type": "null"}', "disable_any_whitespace": True}},
        Grammar("json_schema", '{"type": "null"}'),
    ),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "[0-9]{3}"}, Grammar("regex", "[0-9]{3}")),
    ({"guided_choice": ["a", "é"]}, Grammar("choice", '["a", "\\u00e9"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
]


@pytest.mark.parametrize(("body", "expected"), FORMS)
async def test_grammars_reach_the_engine(body, expected) -> None:
    text_engine = make_text_engine()
    for run in (complete, ask):
        await run(text_engine, body)
        assert grammar_of(text_engine) == expected


BAD = [
    ({"response_format": {"type": "foo"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "response_format",
        )
        for schema in (
            {"type": "not-a-type"},
            {"type": "string", "pattern": "("},
            {"$ref": "#/$defs/missing"},
            {"$ref": "https://example.com/schema"},
            True,
            [],
            "x",
        )
    ),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
    ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_rejects_invalid_grammars(body, param) -> None:
    text_engine = make_text_engine()
    for run in (complete, ask):
        with pytest.raises(InvalidRequestError) as caught:
            await run(text_engine, body)
        assert caught.value.param == param
        assert len(caught.value.message) < 1000
    assert text_engine.engine.submitted == []
    await complete(text_engine, {"guided_regex": "a"})


async def test_the_tokens_that_complete_a_grammar_are_part_of_the_text() -> None:
    for body in ({}, {"stop_token_ids": [5]}, {"ignore_eos": False}):
        choice = (await complete(make_text_engine("hello"), {"guided_regex": ".*"} | body)).choices[
            0
        ]
        assert (choice.text, choice.finish_reason) == ("hello", "stop")


async def test_a_chat_may_think_before_a_text_with_a_grammar() -> None:
    text_engine = make_text_engine("<think>he</think>\n\nll")
    (choice,) = (await ask(text_engine, {"guided_regex": "l+"})).choices
    assert (choice.message.reasoning, choice.message.content) == ("he", "ll")
    assert "think: " in tag_of(text_engine)
    closed = make_text_engine("ll", template=TEMPLATE + "<think>\n\n</think>\n\n")
    (choice,) = (await ask(closed, {"guided_regex": "l+"})).choices
    assert choice.message.content == "ll"
    assert tag_of(closed) == ""


async def test_the_grammar_of_a_completion_has_no_structural_tag() -> None:
    text_engine = make_text_engine("<think>he</think>")
    choice = (await complete(text_engine, {"guided_regex": ".*"})).choices[0]
    assert choice.text == "<think>he</think>"
    assert tag_of(text_engine) == ""


async def test_the_text_format_of_responses_becomes_a_grammar() -> None:
    text_engine = make_text_engine()
    for form, expected in (
        ({"type": "json_object"}, Grammar("json_object")),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"type": "text"}, None),
    ):
        body = {"input": "hello", "text": {"format": form}}
        request = decode(json.dumps(body).encode(), ResponsesRequest)
        reply = await responses.complete(await responses.prepare(text_engine, request))
        assert grammar_of(text_engine) == expected
        assert reply.text["format"] == form


@pytest.mark.parametrize("parallel", [None, False])
async def test_tool_choice_can_require_calls(parallel) -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    text_engine = make_text_engine(text)
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    (choice,) = (await ask(text_engine, body)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [("f", '{"a": 1}'), ("g", "{}")][: 1 if parallel is False else 2]
    grammar = grammar_of(text_engine)
    assert grammar is not None
    schema = json.loads(grammar.spec)
    assert schema["type"] == "array"
    assert schema.get("maxItems") == (1 if parallel is False else None)


async def test_tool_choice_can_name_a_function() -> None:
    text_engine = make_text_engine('{"a": 1}')
    choice_of_f = {"type": "function", "function": {"name": "f"}}
    (choice,) = (await ask(text_engine, {"tools": TOOLS, "tool_choice": choice_of_f})).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    assert choice.finish_reason == "tool_calls"
    grammar = grammar_of(text_engine)
    assert grammar is not None
    assert json.loads(grammar.spec) == SCHEMA
    cut = await ask(text_engine, {"tools": TOOLS, "tool_choice": choice_of_f, "max_tokens": 3})
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("tokens_per_output", [1, 100])
async def test_a_truncated_forced_call_is_not_content(tokens_per_output) -> None:
    whole = '[{"name": "f", "parameters": {"a": 1}}'
    body = {"tools": TOOLS, "tool_choice": "required"}
    for text, num_calls in (("[", 0), ('[{"name"', 0), (whole, 1), (whole + ', {"name": "g"', 1)):
        text_engine = make_text_engine(text, tokens_per_output=tokens_per_output)
        cut = {"max_tokens": len(text_engine.model.tokenizer.encode(text))}
        (choice,) = (await ask(text_engine, body | cut)).choices
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert len(choice.message.tool_calls or ()) == num_calls


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


@pytest.mark.parametrize("thought", ["", "<think>hm</think>\n\n"])
async def test_a_chat_with_tools_and_a_grammar_has_calls_or_content(thought) -> None:
    for text, content, num_calls in ((CALL + "\n" + CALL, None, 2), ('{"a": 1}', '{"a": 1}', 0)):
        text_engine = make_text_engine(thought + text)
        (choice,) = (await ask(text_engine, FORMAT | {"tools": TOOLS})).choices
        assert choice.message.content == content
        assert len(choice.message.tool_calls or ()) == num_calls
        assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
        assert grammar_of(text_engine) == Grammar("json_schema", json.dumps(SCHEMA))
        tag = tag_of(text_engine)
        assert "(@content | calls)" in tag
        assert all(f'"enum": ["{name}"]' in tag for name in "fg")
        assert "call)*" in tag
    await ask(text_engine, FORMAT | {"tools": TOOLS, "parallel_tool_calls": False})
    assert "call)*" not in tag_of(text_engine)
    await ask(text_engine, FORMAT | {"tools": TOOLS, "tool_choice": "none"})
    assert "calls" not in tag_of(text_engine)


async def test_response_format_does_not_apply_to_forced_calls() -> None:
    text_engine = make_text_engine('<think>hm</think>[{"name": "f", "parameters": {"a": 1}}]')
    required = {"tools": TOOLS, "tool_choice": "required"}
    (choice,) = (await ask(text_engine, FORMAT | required)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["f"]
    assert choice.message.reasoning == "hm"
    grammar = grammar_of(text_engine)
    assert grammar is not None
    assert json.loads(grammar.spec)["type"] == "array"
    assert "think: " in tag_of(text_engine)
    with pytest.raises(InvalidRequestError) as caught:
        await ask(text_engine, {"guided_regex": "a"} | required)
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_rejects_tools_without_a_valid_grammar(choice) -> None:
    text_engine = make_text_engine()
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}]
    with pytest.raises(InvalidRequestError) as caught:
        await ask(text_engine, FORMAT | {"tools": bad, "tool_choice": choice})
    assert caught.value.param == "tools"
    many = {f"k{i}": {"type": "string", "description": "x" * 1000} for i in range(300)}
    large = [{"type": "function", "function": {"name": "f", "parameters": {"properties": many}}}]
    with pytest.raises(InvalidRequestError, match="tools: .* at most 262144 characters") as caught:
        await ask(text_engine, FORMAT | {"tools": large, "tool_choice": choice})
    assert caught.value.param == "tools"
    pythonic = make_text_engine(tool_call_parser="pythonic")
    await ask(pythonic, {"tools": TOOLS})
    with pytest.raises(InvalidRequestError, match="pythonic") as caught:
        await ask(pythonic, FORMAT | {"tools": TOOLS})
    assert caught.value.param == "tools"
    assert len(pythonic.engine.submitted) == 1

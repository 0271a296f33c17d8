"""Failures that users of other servers have reported: schemas, patterns and grammars."""

import json
from typing import Any

import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import HISTORY_TEMPLATE

INTEGER = {"type": "integer"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


def generated(server, field: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    """Returns the only choice of a random completion of at most 200 tokens."""
    body = {"prompt": "a", "max_tokens": 200, "seed": seed, "temperature": 1, **field, **more}
    reply = server.post(COMPLETIONS, body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


NODE = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/n"}},
    "required": ["x"],
    "additionalProperties": False,
}
ENDLESS = [
    {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2},
    {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#"}], "$defs": {"n": NODE}},
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
    },
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_js_153_a_schema_that_cannot_end_is_refused(server, set_templates, schema) -> None:
    start = {"prompt": "a"}
    error = server.refused(COMPLETIONS, {**start, **json_schema(schema)})
    assert error["param"] == "response_format"
    assert "no finite value matches" in error["message"]
    body = {**start, "structured_outputs": {"json": schema}}
    assert server.refused(COMPLETIONS, body)["param"] == "structured_outputs"
    set_templates(HISTORY_TEMPLATE)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    if schema.get("type") == "object":
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
        assert server.refused(CHAT, {**body, "tool_choice": "required"})["param"] == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [INTEGER, {"$ref": "#/$defs/n"}], "$defs": {"n": NODE}},
        {**NODE, "required": [], "$defs": {"n": NODE}},
        {"type": "array", "items": {"$ref": "#"}},
        {"properties": {"x": {"$ref": "#"}}, "required": ["x"], "maxLength": 5},
        {"type": ["object", "null"], **{k: NODE[k] for k in ("properties", "required")}}
        | {"$defs": {"n": NODE}},
    ],
)
def test_js_153_parts_that_cannot_end_are_left_out(server, schema) -> None:
    for seed in range(8):
        choice = generated(server, json_schema(schema), seed)
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])
        assert '"x"' not in choice["text"]


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" start', 'start: "a" x?\nx: "b" x | "c" x', 'root ::= "a" | "a" x\nx ::= "b" x'],
)
def test_js_153_rules_that_cannot_end_are_refused(server, grammar) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": grammar}})
    assert "no text of finite length matches the rule" in error["message"]


SLOW = "^(([a-z]{1,100}){1,100}){1,100}$"


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": SLOW},
        json_schema({"type": "string", "pattern": SLOW}),
        json_schema({**PARAMETERS, "properties": {"a": {"pattern": SLOW, "type": "string"}}}),
        json_schema(
            {**PARAMETERS, "properties": {"b": {"pattern": SLOW, "type": "string"}}, "required": []}
        ),
    ],
)
def test_js_153_a_pattern_that_fails_after_some_tokens_is_refused(server, field) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a", **field})
    assert error["message"].endswith("lexer error: too many expressions constructed")


def test_js_153_large_schemas_are_served(server) -> None:
    values = [f"value {i}" for i in range(10_000)]
    assert json.loads(generated(server, json_schema({"enum": values}), 1)["text"]) in values
    endless = {"type": "array", "items": INTEGER, "minItems": 10**9}
    assert generated(server, json_schema(endless), 1)["finish_reason"] == "length"
    text = generated(server, {"guided_regex": "(a+)+b"}, 1)["text"]
    assert set(text) <= {"a", "b"}


def test_js_153_an_error_of_the_lexer_ends_only_its_request(server, monkeypatch) -> None:
    """The check passes, as it may, and the engine meets the error."""

    async def passes(grammar: Any) -> None:
        return None

    monkeypatch.setattr(server.text_engine.grammars, "check", passes)
    long = {"prompt": "a", "max_tokens": 200, "guided_regex": SLOW, "min_tokens": 200}
    error = server.refused(COMPLETIONS, {**long, "seed": 1, "temperature": 1})
    assert "too many expressions constructed" in error["message"]
    streamed = server.post(COMPLETIONS, {**long, "seed": 1, "temperature": 1, "stream": True})
    last = streamed.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    assert json.loads(last)["error"] == error


SCORE = {"type": "object", "properties": {"score": INTEGER}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**SCORE, "required": ["score"], "patternProperties": {"^score$": {"minimum": 3}}},
        {**SCORE, "patternProperties": {"^score$": INTEGER}},
        {
            **SCORE,
            "properties": {"a": INTEGER, "b": {"type": "boolean"}},
            "patternProperties": {"^(a|b)$": {}},
        },
        {
            **SCORE,
            "properties": {"inner": {**SCORE, "patternProperties": {"^score$": INTEGER}}},
            "required": ["inner"],
        },
    ],
)
def test_pub_08_patterns_of_declared_names_are_no_dead_end(server, schema) -> None:
    for seed in range(12):
        choice = generated(server, json_schema(schema), seed)
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["text"])
        assert "score" not in value or "minimum" not in str(schema) or value["score"] >= 3


def test_pub_08_patterns_of_more_names_still_allow_them(server) -> None:
    names = set()
    more = {**SCORE, "patternProperties": {"^(score|other)$": INTEGER}}
    for seed in range(30):
        choice = generated(server, json_schema(more), seed, temperature=5)
        if choice["finish_reason"] == "stop":
            names |= set(json.loads(choice["text"]))
    assert names == {"score", "other"}


@pytest.mark.parametrize("form", ["password", "binary", "byte", "int64", "regex", "uri-reference"])
def test_pub_23_unknown_formats_are_annotations(server, form) -> None:
    schema = {"type": "string", "format": form, "maxLength": 9}
    assert isinstance(json.loads(generated(server, json_schema(schema), 1)["text"]), str)
    nested = {**SCORE, "properties": {"format": schema}, "required": ["format"]}
    assert json.loads(generated(server, json_schema(nested), 1)["text"])["format"] is not None


def test_pub_23_a_refusal_names_no_option_that_nobody_can_set(server) -> None:
    schema = {"oneOf": [INTEGER, {"type": "number"}]}
    error = server.refused(COMPLETIONS, {"prompt": "a", **json_schema(schema)})
    assert "coerce" not in error["message"]
    assert "oneOf" in error["message"]
    for keyword in ("not", "if", "contains", "propertyNames", "dependentSchemas"):
        error = server.refused(COMPLETIONS, {"prompt": "a", **json_schema({keyword: {}})})
        assert keyword in error["message"]


TINY = {"type": "boolean"}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "schema": TINY}},
        {"response_format": {"type": "json_object", "schema": TINY}},
        {"json_schema": TINY},
        {"json_schema": json.dumps(TINY)},
        {"grammar": 'root ::= "true" | "false"'},
        {"ebnf": 'root ::= "true" | "false"'},
        {"regex": "true|false"},
    ],
)
def test_pub_24_schemas_of_other_servers_are_enforced(server, field) -> None:
    assert generated(server, field, 1)["text"].strip() in ("true", "false")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30, **field}
    (choice,) = server.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"].strip() in ("true", "false")


def test_pub_24_other_values_are_refused_by_name(server) -> None:
    for field in ("json_schema", "grammar", "ebnf", "regex"):
        assert server.refused(COMPLETIONS, {"prompt": "a", field: 5})["param"] == field
    two = {"prompt": "a", "grammar": 'root ::= "a"', "regex": "a"}
    assert "at most one of" in server.refused(COMPLETIONS, two)["message"]
    body = {"prompt": "a", "response_format": {"type": "json_object", "schema": "x"}}
    assert server.refused(COMPLETIONS, body)["param"] == "response_format"
    assert server.complete("a", grammar="", json_schema=None, max_tokens=1)["choices"]

import json

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.parsing.enforced import call_schema, json_array_calls, named_call
from jaxserve.parsing.parser import Parser

F = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = {"f": F, "g": {}}


def test_required_calls_are_an_array():
    schema = call_schema(TOOLS)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    f, g = schema["items"]["anyOf"]
    assert f["properties"] == {"name": {"type": "string", "enum": ["f"]}, "parameters": F}
    assert f["required"] == ["name", "parameters"]
    assert g["properties"]["parameters"] == {"type": "object"}
    assert call_schema(TOOLS, parallel=False)["maxItems"] == 1


def test_a_named_call_is_its_arguments():
    assert call_schema(TOOLS, name="f") == F
    assert call_schema(TOOLS, name="g") == {"type": "object"}


def find(schema, reference):
    """What a JSON pointer points at."""
    for key in reference.removeprefix("#").split("/")[1:]:
        schema = schema[key.replace("~1", "/").replace("~0", "~")]
    return schema


def test_references_still_point_at_their_targets():
    def tool(target):
        return {
            "properties": {
                "x": {"$ref": "#/$defs/X"},
                "$ref": {"type": "null"},
                "me": {"$ref": "#"},
            },
            "$defs": {"X": {"enum": [target]}},
        }

    schema = call_schema({"a/b~": tool(1), "c": tool(2), "d": F})
    for call, target in zip(schema["items"]["anyOf"][:2], (1, 2), strict=True):
        parameters = find(schema, call["properties"]["parameters"]["$ref"])
        assert find(schema, parameters["properties"]["x"]["$ref"]) == {"enum": [target]}
        assert find(schema, parameters["properties"]["me"]["$ref"]) is parameters
        assert parameters["properties"]["$ref"] == {"type": "null"}
    assert schema["items"]["anyOf"][2]["properties"]["parameters"] == F
    # Alone it is its own root.
    assert call_schema({"c": tool(2)}, name="c")["properties"]["x"] == {"$ref": "#/$defs/X"}


def test_the_schemas_of_the_request_are_left_as_they_are():
    tools = {"f": {"properties": {"x": {"$ref": "#"}}}}
    before = json.dumps(tools)
    call_schema(tools)
    assert json.dumps(tools) == before


def test_a_schema_without_bounds_is_refused():
    schema: dict = {"$ref": "#"}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="deeper"):
        call_schema({"f": schema})


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_complete"),
    [
        (
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]\n',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
            2,
        ),
        (' [{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')], 0),
        ('[{"name": "f"', '[{"name": "f"', [], 0),
        ("Sorry, no.\n", "Sorry, no.\n", [], 0),
        ('[{"name": "h", "parameters": {}}]', '[{"name": "h", "parameters": {}}]', [], 0),
    ],
)
def test_array_of_calls(read_cut, text, content, calls, num_complete):
    answer = read_cut(lambda: Parser(json_array_calls, tools=TOOLS), text)
    assert (answer.content, answer.calls, answer.num_complete) == (content, calls, num_complete)


@pytest.mark.parametrize(
    ("text", "content", "arguments", "num_complete"),
    [
        ('{"a": {"b": 1}}', "", '{"a": {"b": 1}}', 1),
        (' {"a": 1} \n', "", '{"a": 1}', 1),
        ('{"a": 1} and', " and", '{"a": 1}', 1),
        ('{"a": "', "", '{"a": "', 0),
        ("[1]", "[1]", None, 0),
        ("", "", None, 0),
    ],
)
def test_named_call(read_cut, text, content, arguments, num_complete):
    answer = read_cut(lambda: Parser(named_call("f"), tools=TOOLS), text)
    assert answer.calls == ([] if arguments is None else [("f", arguments)])
    assert (answer.content, answer.num_complete) == (content, num_complete)

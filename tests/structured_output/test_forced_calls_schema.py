"""The JSON schema that forces tool calls."""

import json

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.structured_output.structural_tag import forced_calls_schema

F = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = {"f": F, "g": {}}


def test_required_calls_are_an_array():
    schema = forced_calls_schema(TOOLS)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    f, g = schema["items"]["anyOf"]
    assert f["properties"] == {"name": {"type": "string", "enum": ["f"]}, "parameters": F}
    assert f["required"] == ["name", "parameters"]
    assert g["properties"]["parameters"] == {"type": "object"}
    assert forced_calls_schema(TOOLS, parallel=False)["maxItems"] == 1


def test_a_named_call_is_its_arguments():
    assert forced_calls_schema(TOOLS, name="f") == F
    assert forced_calls_schema(TOOLS, name="g") == {"type": "object"}


def resolve(schema, reference):
    """Resolves a JSON pointer."""
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

    schema = forced_calls_schema({"a/b~": tool(1), "c": tool(2), "d": F})
    for call, target in zip(schema["items"]["anyOf"][:2], (1, 2), strict=True):
        parameters = resolve(schema, call["properties"]["parameters"]["$ref"])
        assert resolve(schema, parameters["properties"]["x"]["$ref"]) == {"enum": [target]}
        assert resolve(schema, parameters["properties"]["me"]["$ref"]) is parameters
        assert parameters["properties"]["$ref"] == {"type": "null"}
    assert schema["items"]["anyOf"][2]["properties"]["parameters"] == F
    # A named call is the schema of its function, so references need no change.
    assert forced_calls_schema({"c": tool(2)}, name="c")["properties"]["x"] == {"$ref": "#/$defs/X"}


def test_the_schemas_of_the_request_do_not_change():
    tools = {"f": {"properties": {"x": {"$ref": "#"}}}}
    before = json.dumps(tools)
    forced_calls_schema(tools)
    assert json.dumps(tools) == before


def test_rejects_a_schema_that_is_nested_too_deeply():
    schema: dict = {"$ref": "#"}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="deeper"):
        forced_calls_schema({"f": schema})

"""Calls that a request insists on: the schema that the answer is held to, and how it is read.

With ``tool_choice: "required"`` the answer is an array of calls, with a named function it is the
arguments of that function, both plain JSON whatever the model's own format is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.parsing.json_call import json_calls, stream_object
from jaxserve.parsing.parser import Format
from jaxserve.parsing.scanner import Scanner, Steps

_MAX_DEPTH = 64  # of a schema whose references have to be rewritten


def call_schema(
    tools: Mapping[str, Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
) -> dict[str, Any]:
    """The JSON schema of an answer that is nothing but calls.

    Args:
      tools: function names -> JSON schemas of their parameters (empty: no parameters are known).
      name: the one that must be called; the answer is its arguments, for `named_call`. None: one or
        more of any, as ``[{"name": ..., "parameters": {...}}]``, for `json_array_calls`.
      parallel: whether there may be more than one call.

    Raises:
      InvalidRequestError: a schema with references is nested too deeply.
    """
    assert tools
    if name is not None:
        return _object_schema(tools[name])
    call = any_call_schema(tools, arguments="parameters")
    shared = {"$defs": call.pop("$defs")} if "$defs" in call else {}
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": call, **most, **shared}


def any_call_schema(tools: Mapping[str, Mapping[str, Any]], *, arguments: str) -> dict[str, Any]:
    """The JSON schema of one call of any tool, ``{"name": ..., arguments: {...}}``.

    Raises:
      InvalidRequestError: a schema with references is nested too deeply.
    """
    shared: dict[str, Any] = {}
    calls = []
    for tool, parameters in tools.items():
        schema = _object_schema(parameters)
        place = "#/$defs/" + tool.replace("~", "~0").replace("/", "~1")
        moved = _moved(schema, place, _MAX_DEPTH)
        if moved != schema:
            shared[tool] = moved
            schema = {"$ref": place}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool]}, arguments: schema},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": shared} if shared else {"anyOf": calls}


def json_array_calls(scan: Scanner) -> Steps[None]:
    """The format of an answer that is an array of calls."""
    yield from json_calls(scan)
    yield from scan.skip()


def named_call(name: str) -> Format:
    """The format of an answer that is the arguments of one function."""

    def read(scan: Scanner) -> Steps[None]:
        if (yield from scan.seek()) == "{":
            scan.start_call(name)
            yield from stream_object(scan)
            yield from scan.skip()

    return read


def _object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that allows objects only: arguments are always one."""
    return {"type": "object", **parameters}


def _moved(schema: Any, place: str, depth: int) -> Any:
    """A schema whose references to its own root point to a place in a greater schema."""
    if depth == 0:
        raise InvalidRequestError(
            f"tools: a schema is nested deeper than {_MAX_DEPTH} levels", param="tools"
        )
    if isinstance(schema, list):
        return [_moved(part, place, depth - 1) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(part, place, depth - 1) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved

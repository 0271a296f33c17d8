"""Values that are written as plain text, typed by the JSON schema of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.parsing.json_text import is_json
from jaxserve.parsing.python_literal import python_literal
from jaxserve.parsing.scanner import read_whole

_MAX_DEPTH = 8  # of references and alternatives that are followed
_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_TYPES = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{list: "array", dict: "object", type(None): "null"},
}


def typed_json(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """The JSON text of a value.

    It is the value that the text spells in JSON or Python, if the schema allows its type or says
    nothing of this key; otherwise it is the text itself as a string.

    Args:
      text: the value as the model wrote it.
      parameters: the JSON schema of an object.
      key: the property that the value belongs to.
    """
    types = property_types(parameters, key)
    if types != {"string"}:
        value = text.strip()
        spelled = value if is_json(value) else read_whole(value, python_literal)
        if spelled and not spelled.startswith('"') and (not types or _kinds(spelled) & types):
            return spelled
    return json.dumps(text, ensure_ascii=False)


def property_types(parameters: Mapping[str, Any], key: str) -> set[str]:
    """The types that the JSON schema of an object allows for a property; empty: any."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _MAX_DEPTH)


def _kinds(spelled: str) -> set[str]:
    """The types that a JSON text has."""
    kind = _KINDS.get(spelled[0])
    if kind is not None:
        return {kind}
    return {"number"} if any(char in spelled for char in ".eE") else {"integer", "number"}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """The types that a schema allows; empty if it allows all, or does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_target(schema["$ref"], root), root, depth - 1)
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {name for name in types if isinstance(name, str)}
    if "const" in schema:
        return {_TYPES[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        return {_TYPES[type(value)] for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_types(part, root, depth - 1) for part in schema[key]]
            return set().union(*found) if all(found) else set()
    return set()


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema, #/$defs/name, points at; None if that is not there."""
    place: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        place = place.get(key) if isinstance(place, Mapping) else None
    return place

"""The format of Qwen 3 Coder: tags around the name and around each value.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value is plain text; the JSON schema of the tool gives its type. The model sometimes leaves out
the outer tags, or the end tag of a value or function if the next tag implies it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.parsing.json_text import is_json
from jaxserve.parsing.python_literal import python_literal
from jaxserve.parsing.scanner import NAME, Reading, Scanner, read_whole
from jaxserve.structured_output.json_schema import target_of
from jaxserve.structured_output.structural_tag import RuleWriter, quoted

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^<>\n]+")

_MAX_DEPTH = 8  # of references and alternatives that are followed
_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_TYPES = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{list: "array", dict: "object", type(None): "null"},
}


def qwen3_coder(scan: Scanner) -> Reading[None]:
    """Reads functions, with or without tags around them."""
    tag = ""
    while tag or (tag := (yield from scan.find(_CALL, _FUNCTION))):
        if tag == _CALL:
            yield from scan.skip()
            tag = yield from scan.match(_FUNCTION, _CALL)
        elif tag == _FUNCTION:
            tag = yield from _function(scan)
        else:  # the end of a function
            scan.drop()
            yield from scan.skip()
            tag = yield from scan.match(_END_CALL, _CALL, _FUNCTION)
            scan.in_call = not tag
        if tag == _END_CALL:
            scan.drop()
            scan.in_call = False
            tag = ""


def _function(scan: Scanner) -> Reading[str]:
    """Reads a function; returns the tag that ended it, or "" if it is malformed."""
    name = yield from scan.run(NAME)
    if not (yield from scan.accept(">")) or not scan.out.knows(name):
        return ""
    scan.start_call(name)
    schema = scan.out.parameters(name)
    separator, tag = "{", ""
    while True:
        if not tag:
            yield from scan.skip()
            tag = yield from scan.match(_PARAMETER, _END_FUNCTION, _END_CALL)
        if tag in (_END_FUNCTION, _END_CALL):
            scan.out.arguments("{}" if separator == "{" else "}")
            scan.out.end_call()
            return tag
        if tag != _PARAMETER:
            return ""
        key = yield from scan.run(_KEY)
        if not key or not (yield from scan.accept(">")):
            return ""
        value, tag = yield from scan.until(_END_PARAMETER, _PARAMETER, _END_FUNCTION)
        if not tag:
            return ""
        text = typed_json(value.removeprefix("\n").removesuffix("\n"), schema, key)
        scan.out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {text}")
        separator = ", "
        scan.drop()
        if tag == _END_PARAMETER:
            tag = ""


def typed_json(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """Returns the JSON text of a value.

    Text in JSON or Python syntax becomes that value if the schema allows the type of the value, or
    gives no type for the key. Any other text becomes a string.

    Args:
      text: the value as the model wrote it.
      parameters: the JSON schema of an object.
      key: the name of the property.
    """
    types = property_types(parameters, key)
    if types != {"string"}:
        value = text.strip()
        spelled = value if is_json(value) else read_whole(value, python_literal)
        if spelled and not spelled.startswith('"') and (not types or _kinds(spelled) & types):
            return spelled
    return json.dumps(text, ensure_ascii=False)


def property_types(parameters: Mapping[str, Any], key: str) -> set[str]:
    """Returns the types that the schema of an object allows for a property; empty: any type."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _MAX_DEPTH, {})


def _kinds(spelled: str) -> set[str]:
    """Returns the types of JSON schemas that a JSON text has."""
    kind = _KINDS.get(spelled[0])
    if kind is not None:
        return {kind}
    return {"number"} if any(char in spelled for char in ".eE") else {"integer", "number"}


def _types(
    schema: Any, root: Mapping[str, Any], depth: int, known: dict[str, set[str]]
) -> set[str]:
    """Returns the types that a schema allows; empty: any type.

    ``known`` has the types of the references met so far, so each is followed once. A reference that
    leads back to itself allows any type.
    """
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = set()
            known[reference] = _types(target_of(reference, root), root, depth - 1, known)
        return known[reference]
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
            found = [_types(part, root, depth - 1, known) for part in schema[key]]
            return set().union(*found) if all(found) else set()
    return set()


def qwen3_coder_rules(rules: RuleWriter) -> str:
    """Writes the rule ``calls``. For strings, it enforces only the ``enum`` of the schema.

    Raises:
      InvalidRequestError: the schemas of the arguments are too long, or no finite call matches.
    """
    first, last = rules.tag(_CALL), rules.tag(_END_CALL)
    functions = " | ".join(f"function_{i}" for i in range(len(rules.arguments)))
    written = rules.calls(f'{first} "\\n"? ({functions}) "\\n"? {last}', between='"\\n"?')
    for i, (name, schema) in enumerate(rules.arguments.items()):
        opening, values = quoted(f"{_FUNCTION}{name}>\n"), " ".join(_values(rules, name, schema))
        written += f"function_{i}: {opening} {values} {quoted(_END_FUNCTION)}\n"
    end = quoted(f"\n{_END_PARAMETER}\n")
    return written + f"text[suffix={end}]: /(.|\\n)*/\n"


def _values(rules: RuleWriter, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns a term for each argument of a tool, in order."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    names = required if isinstance(required, list) else ()
    needed = {name for name in names if isinstance(name, str)}
    terms = []
    for key, part in properties.items():
        if _KEY.fullmatch(key) and part is not False:
            before = quoted(f"{_PARAMETER}{key}>\n")
            value = _value(rules, rules.tools[name], key, part)
            terms.append(f"({before} {value}){'' if key in needed else '?'}")
    return terms


def _value(rules: RuleWriter, parameters: Mapping[str, Any], key: str, part: Any) -> str:
    """Returns the term for a value that matches a part of a schema, and its end tag."""
    if property_types(parameters, key) != {"string"}:
        term = rules.json_value(part)
    elif isinstance(choices := parameters["properties"][key].get("enum"), list):
        texts = [choice for choice in choices if isinstance(choice, str)]
        term = "(" + " | ".join(map(quoted, texts)) + ")"
    else:
        return "text"
    return f"{term} {quoted(chr(10) + _END_PARAMETER + chr(10))}"

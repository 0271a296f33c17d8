"""The form of Qwen 3 Coder: tags around the name and around each value.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value is plain text; its type is that of the tool's JSON schema. The outer tags are sometimes left
out by the model, and so are the ends of a value or of a function that the next tag makes clear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.parsing.call_rules import RuleWriter, quoted
from jaxserve.parsing.scanner import NAME, Scanner, Steps
from jaxserve.parsing.typed_text import property_types, typed_json
from jaxserve.structured_output.grammar import json_term

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^<>\n]+")


def qwen3_coder(scan: Scanner) -> Steps[None]:
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


def _function(scan: Scanner) -> Steps[str]:
    """Reads a function up to its end; the tag that ended it, "" if it is not well-formed."""
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


def qwen3_coder_rules(rules: RuleWriter) -> str:
    """For `registry.CALL_RULES`. Of texts the schema is not looked at beyond their choices."""
    first, last = rules.mark(_CALL), rules.mark(_END_CALL)
    functions = " | ".join(f"function_{i}" for i in range(len(rules.tools)))
    written = rules.calls(f'{first} "\\n"? ({functions}) "\\n"? {last}', between='"\\n"?')
    for i, (name, parameters) in enumerate(rules.tools.items()):
        opening, values = quoted(f"{_FUNCTION}{name}>\n"), " ".join(_values(parameters))
        written += f"function_{i}: {opening} {values} {quoted(_END_FUNCTION)}\n"
    end = quoted(f"\n{_END_PARAMETER}\n")
    return written + f"text[suffix={end}]: /(.|\\n)*/\n"


def _values(parameters: Mapping[str, Any]) -> list[str]:
    """What may stand for each property of a schema, in their order."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, Mapping):
        return []
    terms = []
    for key, schema in properties.items():
        if _KEY.fullmatch(key):
            before = quoted(f"{_PARAMETER}{key}>\n")
            optional = "" if isinstance(required, list) and key in required else "?"
            terms.append(f"({before} {_value(parameters, key, schema)}){optional}")
    return terms


def _value(parameters: Mapping[str, Any], key: str, schema: Any) -> str:
    """A value and the end of it."""
    if property_types(parameters, key) != {"string"}:
        definitions = {k: v for k, v in parameters.items() if k in ("$defs", "definitions")}
        term = json_term({**schema, **definitions} if isinstance(schema, Mapping) else {})
    elif isinstance(schema.get("enum"), list):
        term = "(" + " | ".join(quoted(choice) for choice in schema["enum"]) + ")"
    else:
        return "text"
    return f"{term} {quoted(chr(10) + _END_PARAMETER + chr(10))}"

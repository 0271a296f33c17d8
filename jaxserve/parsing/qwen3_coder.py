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

from jaxserve.parsing.scanner import NAME, Scanner, Steps
from jaxserve.parsing.typed_text import typed_json

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

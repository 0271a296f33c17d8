"""The format of Llama 3: <|python_tag|>{"name": ..., "parameters": ...}; {...}, the tag optional.

An object without the tag is a call only at the beginning of the completion or right after a call.
Anywhere else, it may be an example in prose.
"""

from __future__ import annotations

import re

from jaxserve.parsing.json_call import json_call
from jaxserve.parsing.scanner import Reading, Scanner
from jaxserve.structured_output.structural_tag import RuleWriter

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[ \t\r\n;]+")


def llama3_json(scan: Scanner) -> Reading[None]:
    """Reads calls separated by semicolons."""
    yield from scan.skip()
    while True:
        if (yield from scan.peek()) == "{" and (yield from json_call(scan)):
            yield from scan.skip(_BETWEEN)
            char = yield from scan.peek()
            if char == "{" or (char == "<" and (yield from scan.match(_TAG))):
                yield from scan.skip()
                continue
        if not (yield from scan.find(_TAG)):
            return
        yield from scan.skip()


def llama3_json_rules(rules: RuleWriter) -> str:
    """Writes the rule ``calls``."""
    before = f"{rules.tag(_TAG)}?"
    return rules.calls(rules.json_call("parameters"), before=before, between='"; "')

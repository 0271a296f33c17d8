"""The format of Hermes, Qwen 2.5 and Qwen 3.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import re

from jaxserve.parsing.json_call import json_calls
from jaxserve.parsing.scanner import Reading, Scanner
from jaxserve.structured_output.structural_tag import RuleWriter

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SURPLUS = re.compile(r"[ \t\r\n}\]]+")  # models write too many closing brackets


def hermes(scan: Scanner) -> Reading[None]:
    """Reads calls between tags."""
    tag = ""
    while tag == _OPEN or (yield from scan.find(_OPEN)):
        tag = ""
        yield from json_calls(scan)
        if scan.in_call:
            yield from scan.skip(_SURPLUS)
            scan.drop()
            tag = yield from scan.match(_CLOSE, _OPEN)  # the end tag may be missing
            if tag == _CLOSE:
                scan.drop()
            scan.in_call = scan.in_call and not tag


def hermes_rules(rules: RuleWriter) -> str:
    """Writes the rule ``calls``."""
    first, last = rules.tag(_OPEN), rules.tag(_CLOSE)
    call = f'{first} "\\n"? {rules.json_call("arguments")} "\\n"? {last}'
    return rules.calls(call, between='"\\n"?')

"""The form of Hermes, Qwen 2.5 and Qwen 3.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import re

from jaxserve.parsing.call_rules import RuleWriter
from jaxserve.parsing.json_call import json_calls
from jaxserve.parsing.scanner import Scanner, Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SURPLUS = re.compile(r"[ \t\r\n}\]]+")  # models miscount the brackets at the end


def hermes(scan: Scanner) -> Steps[None]:
    tag = ""
    while tag == _OPEN or (yield from scan.find(_OPEN)):
        tag = ""
        yield from json_calls(scan)
        if scan.in_call:
            yield from scan.skip(_SURPLUS)
            scan.drop()
            tag = yield from scan.match(_CLOSE, _OPEN)
            if tag == _CLOSE:
                scan.drop()
            scan.in_call = scan.in_call and not tag


def hermes_rules(rules: RuleWriter) -> str:
    """For `registry.CALL_RULES`."""
    first, last = rules.mark(_OPEN), rules.mark(_CLOSE)
    call = f'{first} "\\n"? {rules.json_call("arguments")} "\\n"? {last}'
    return rules.calls(call, between='"\\n"?')

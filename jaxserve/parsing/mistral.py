"""The forms of Mistral.

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}

In the second one, [CALL_ID] and an id may follow the name, and [ARGS] may be left out.
"""

from __future__ import annotations

from jaxserve.parsing.call_rules import RuleWriter
from jaxserve.parsing.json_call import json_calls, stream_object
from jaxserve.parsing.scanner import NAME, Scanner, Steps

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral(scan: Scanner) -> Steps[None]:
    while (yield from scan.find(_CALLS)):
        if (yield from scan.seek()) in ("[", "{"):
            yield from json_calls(scan)
        else:
            yield from _named(scan)


def _named(scan: Scanner) -> Steps[None]:
    name = yield from scan.run(NAME)
    if not scan.out.knows(name):
        return
    if (yield from scan.peek()) == "[":
        tag = yield from scan.match(_ARGS, _ID)
        if tag == _ID:
            yield from scan.skip(NAME)
            tag = yield from scan.match(_ARGS)
        if not tag:
            return
    if (yield from scan.seek()) == "{":
        scan.start_call(name)
        yield from stream_object(scan)


def mistral_rules(rules: RuleWriter) -> str:
    """For `registry.CALL_RULES`: the first form, which every model of the family has seen."""
    before = f'{rules.mark(_CALLS)} "["'
    return rules.calls(rules.json_call("arguments"), before=before, between='", "', after='"]"')

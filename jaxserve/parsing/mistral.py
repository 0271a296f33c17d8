"""The two formats of Mistral.

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}

In the second, [CALL_ID] and an ID may follow the name, and [ARGS] is optional.
"""

from __future__ import annotations

from jaxserve.parsing.json_call import json_calls, stream_object
from jaxserve.parsing.scanner import NAME, Reading, Scanner
from jaxserve.structured_output.structural_tag import RuleWriter

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral(scan: Scanner) -> Reading[None]:
    """Reads calls in either format."""
    while (yield from scan.find(_CALLS)):
        if (yield from scan.seek()) in ("[", "{"):
            yield from json_calls(scan)
        else:
            yield from _named(scan)


def _named(scan: Scanner) -> Reading[None]:
    """Reads a call in the second format, after its tag."""
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
    """Writes the rule ``calls`` for the first format, which every Mistral model has seen."""
    before = f'{rules.tag(_CALLS)} "["'
    return rules.calls(rules.json_call("arguments"), before=before, between='", "', after='"]"')

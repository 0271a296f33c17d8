"""The format of Llama 4 and others: a Python list of calls, [f(a=1), g(b="x")].

A list is read as calls only at the beginning of the completion, or after <|python_start|>.
"""

from __future__ import annotations

import json

from jaxserve.parsing.python_literal import python_literal
from jaxserve.parsing.scanner import NAME, Reading, Scanner

_START, _END = "<|python_start|>", "<|python_end|>"


def pythonic(scan: Scanner) -> Reading[None]:
    """Reads lists of calls."""
    yield from scan.skip()
    while True:
        if (yield from scan.peek()) == "[":
            yield from _calls(scan)
        if not (yield from scan.find(_START)):
            return
        yield from scan.skip()


def _calls(scan: Scanner) -> Reading[None]:
    """Reads a list of calls, and the end tag if it follows."""
    scan.advance()
    while (yield from _call(scan)):
        yield from scan.skip()
        if not (yield from scan.accept(",")):
            break
    if scan.in_call and (yield from scan.accept("]")):
        scan.drop()
        if (yield from scan.seek()) == "<" and (yield from scan.match(_END)):
            scan.drop()


def _call(scan: Scanner) -> Reading[bool]:
    """Reads one call, and white space before it; the call begins when all of it has been read."""
    yield from scan.skip()
    name = yield from scan.run(NAME)
    if name:
        scan.in_call = False
    if not (yield from scan.accept("(")) or not scan.out.knows(name):
        return False
    arguments: dict[str, str] = {}
    while True:
        yield from scan.skip()
        if (yield from scan.accept(")")):
            break
        key = yield from scan.run(NAME)
        yield from scan.skip()
        if not key.isidentifier() or key in arguments or not (yield from scan.accept("=")):
            return False
        value = yield from python_literal(scan)
        if not value:
            return False
        arguments[key] = value
        if (yield from scan.seek()) != ")" and not (yield from scan.accept(",")):
            return False
    fields = ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items())
    scan.start_call(name)
    scan.out.arguments("{" + fields + "}")
    scan.out.end_call()
    return True

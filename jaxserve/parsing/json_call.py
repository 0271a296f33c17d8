"""Reads calls written as {"name": ..., "arguments": {...}}, which several formats share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.parsing.json_text import decode_string, is_json, json_string, json_value
from jaxserve.parsing.scanner import NAME, Reading, Scanner

_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")  # further keys that a call may have


def json_calls(scan: Scanner) -> Reading[None]:
    """Reads one call or an array of calls, and white space before it.

    Stops at the first wrong character; `Scanner.in_call` tells whether that is within a call.
    """
    if (yield from scan.seek()) != "[":
        yield from json_call(scan)
        return
    scan.advance()
    while (yield from json_call(scan)):
        yield from scan.skip()
        if not (yield from scan.accept(",")):
            if (yield from scan.accept("]")):
                scan.drop()
            break


def json_call(scan: Scanner) -> Reading[bool]:
    """Reads one call, and white space before it; returns True if the call began.

    A call begins once its name and the start of its arguments have been read, in any order, or when
    it ends without arguments. Other keys are skipped. Stops at the first wrong character.
    """
    yield from scan.skip()
    if not (yield from scan.accept("{")):
        return False
    scan.in_call = False
    found = _Found()
    while not scan.in_call:
        if not (yield from _field(scan, found)):
            return scan.in_call
        if found.name and found.arguments:
            _write_call(scan, found.name, found.arguments)
        elif not scan.in_call:
            yield from scan.skip()
            if (yield from scan.accept(",")):
                continue
            is_call = found.name and found.has_only_call_keys
            if not is_call or not (yield from scan.accept("}")):
                return False
            _write_call(scan, found.name, "{}")
            return True
    yield from _end(scan)
    return True


def stream_object(scan: Scanner) -> Reading[bool]:
    """Reads a JSON object and passes it on as arguments of the call that has begun.

    The next character must be "{". Returns False at the first wrong character.
    """
    scan.drop()
    scan.passes_arguments = True
    is_whole = yield from json_value(scan)
    scan.pass_arguments()
    scan.passes_arguments = False
    if is_whole:
        scan.out.end_call()
    return is_whole


@dataclass
class _Found:
    """The fields of a call that has not begun."""

    name: str = ""
    arguments: str = ""
    has_only_call_keys: bool = True


def _field(scan: Scanner, found: _Found) -> Reading[bool]:
    """Reads a key and its value; begins the call if its arguments can be passed on."""
    key = yield from _key(scan)
    if key is None:
        return False
    if key == "name" and not found.name:
        found.name = yield from _name(scan)
        return bool(found.name)
    if key in _ARGUMENTS and not found.arguments:
        yield from scan.skip()
        if found.name and (yield from scan.peek()) == "{":
            scan.start_call(found.name)
            return (yield from stream_object(scan))
        found.arguments = yield from _held_arguments(scan)
        return bool(found.arguments)
    found.has_only_call_keys = found.has_only_call_keys and key in _OTHER_KEYS
    return (yield from json_value(scan))


def _write_call(scan: Scanner, name: str, arguments: str) -> None:
    """Writes a call whose arguments are all known."""
    scan.start_call(name)
    scan.out.arguments(arguments)
    scan.out.end_call()


def _key(scan: Scanner) -> Reading[str | None]:
    """Reads a key and its colon; returns None at the first wrong character."""
    yield from scan.skip()
    start = scan.position()
    if not (yield from json_string(scan)):
        return None
    key = decode_string(scan.since(start))
    yield from scan.skip()
    return key if (yield from scan.accept(":")) else None


def _name(scan: Scanner) -> Reading[str]:
    """Reads the name of a function that can be called; returns "" for any other value."""
    yield from scan.skip()
    start = scan.position()
    if not (yield from json_string(scan)):
        return ""
    name = decode_string(scan.since(start))
    return name if name and NAME.fullmatch(name) and scan.out.knows(name) else ""


def _held_arguments(scan: Scanner) -> Reading[str]:
    """Reads arguments that cannot be streamed: those before the name, null, an object in a string.

    Returns them as a JSON object, or "" if they are invalid.
    """
    start = scan.position()
    if not (yield from json_value(scan)):
        return ""
    text: str | None = scan.since(start)
    if text.startswith('"'):
        text = decode_string(text)
    if text is None:
        return ""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    return text if text.startswith("{") and is_json(text) else ""


def _end(scan: Scanner) -> Reading[None]:
    """Reads the fields after the arguments, and the end of the call."""
    yield from scan.skip()
    while (yield from scan.accept(",")):
        if (yield from _key(scan)) is None or not (yield from json_value(scan)):
            return
        yield from scan.skip()
    if (yield from scan.accept("}")):
        scan.drop()

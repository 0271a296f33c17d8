"""Calls written as {"name": ..., "arguments": {...}}, which several formats share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.parsing.json_text import decode_string, is_json, json_string, json_value
from jaxserve.parsing.scanner import NAME, Scanner, Steps

_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = ("id", "type")  # other keys that a call may have


def json_calls(scan: Scanner) -> Steps[None]:
    """Reads one call or an array of them, with white space before it.

    Stops at the first wrong character; `Scanner.in_call` tells whether it is within a call.
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


def json_call(scan: Scanner) -> Steps[bool]:
    """Reads one call, with white space before it; whether it was announced.

    It is when both its name and the beginning of its arguments are there, in any order, or when it
    has ended without arguments. Further keys are skipped. Stops at the first wrong character.
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
            _send(scan, found.name, found.arguments)
        elif not scan.in_call:
            yield from scan.skip()
            if (yield from scan.accept(",")):
                continue
            if not found.name or not found.is_plain or not (yield from scan.accept("}")):
                return False
            _send(scan, found.name, "{}")
            return True
    yield from _end(scan)
    return True


def stream_object(scan: Scanner) -> Steps[bool]:
    """Reads a JSON object and passes it on as the arguments of the call that has been announced.

    The next character is its "{". False at the first wrong character.
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
    """The fields of a call that has not been announced."""

    name: str = ""
    arguments: str = ""
    is_plain: bool = True  # there is no key that a call would not have


def _field(scan: Scanner, found: _Found) -> Steps[bool]:
    """Reads one key and its value; announces the call if the value is arguments to pass on."""
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
    found.is_plain = found.is_plain and key in _HARMLESS
    return (yield from json_value(scan))


def _send(scan: Scanner, name: str, arguments: str) -> None:
    scan.start_call(name)
    scan.out.arguments(arguments)
    scan.out.end_call()


def _key(scan: Scanner) -> Steps[str | None]:
    yield from scan.skip()
    place = scan.here()
    if not (yield from json_string(scan)):
        return None
    key = decode_string(scan.since(place))
    yield from scan.skip()
    return key if (yield from scan.accept(":")) else None


def _name(scan: Scanner) -> Steps[str]:
    """Reads the name of a function that can be called; "" if it is not one."""
    yield from scan.skip()
    place = scan.here()
    if not (yield from json_string(scan)):
        return ""
    name = decode_string(scan.since(place))
    return name if name and NAME.fullmatch(name) and scan.out.knows(name) else ""


def _held_arguments(scan: Scanner) -> Steps[str]:
    """Reads arguments that cannot be passed on yet: before the name, null, or an object in a text.

    Returns them as a JSON object, "" if they are none.
    """
    place = scan.here()
    if not (yield from json_value(scan)):
        return ""
    text: str | None = scan.since(place)
    if text.startswith('"'):
        text = decode_string(text)
    if text is None:
        return ""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    return text if text.startswith("{") and is_json(text) else ""


def _end(scan: Scanner) -> Steps[None]:
    """Reads what follows the arguments in the object of a call."""
    yield from scan.skip()
    while (yield from scan.accept(",")):
        if (yield from _key(scan)) is None or not (yield from json_value(scan)):
            return
        yield from scan.skip()
    if (yield from scan.accept("}")):
        scan.drop()

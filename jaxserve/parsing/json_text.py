"""Reads JSON in a completion: strictly, while it arrives, and without recursion."""

from __future__ import annotations

import re

import msgspec

from jaxserve.parsing.scanner import Reading, Scanner, read_whole

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = frozenset("0123456789")
_DIGIT_RUN = re.compile(r"[0-9]+")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


def json_value(scan: Scanner) -> Reading[bool]:
    """Reads a JSON value, and white space before it; returns False at the first wrong character.

    JSON forbids line breaks and other control characters in strings, but models write them. In
    arguments that are passed on, they are replaced by their escapes.
    """
    closing: list[str] = []  # brackets of the objects and arrays that are open
    while True:
        char = yield from scan.seek()
        if char in ("{", "["):
            scan.advance()
            closing.append(_CLOSING[char])
            if (yield from scan.seek()) != closing[-1]:
                if char == "{" and not (yield from _key(scan)):
                    return False
                continue
        elif char == '"':
            if not (yield from json_string(scan)):
                return False
        elif not (yield from _scalar(scan, char)):
            return False
        while closing:
            char = yield from scan.seek()
            if char == ",":
                scan.advance()
                if closing[-1] == "}" and not (yield from _key(scan)):
                    return False
                break
            if char != closing[-1]:
                return False
            scan.advance()
            closing.pop()
        else:
            return True


def json_string(scan: Scanner) -> Reading[bool]:
    """Reads a JSON string; returns False at the first wrong character."""
    if not (yield from scan.accept('"')):
        return False
    while True:
        yield from scan.skip(_PLAIN)
        char = yield from scan.peek()
        if char == "" or (char < " " and not scan.passes_arguments):
            return False
        if char < " ":
            scan.pass_arguments()
            scan.advance()
            scan.drop()
            scan.out.arguments(f"\\u{ord(char):04x}")
            continue
        scan.advance()
        if char == '"':
            return True
        if not (yield from _escape(scan)):
            return False


def decode_string(text: str) -> str | None:
    """Returns the value of a JSON string; None if it is not one, or has a lone surrogate."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


def is_json(text: str) -> bool:
    """Returns True if a text is one JSON value; white space around it is allowed."""
    return bool(read_whole(text, json_value))


def _number(scan: Scanner) -> Reading[bool]:
    """Reads a JSON number; returns False at the first wrong character."""
    yield from scan.accept("-")
    if not (yield from scan.accept("0")) and not (yield from _digits(scan)):
        return False
    if (yield from scan.accept(".")) and not (yield from _digits(scan)):
        return False
    if (yield from scan.peek()) in ("e", "E"):
        scan.advance()
        if (yield from scan.peek()) in ("+", "-"):
            scan.advance()
        return (yield from _digits(scan))
    return True


def _digits(scan: Scanner) -> Reading[bool]:
    if (yield from scan.peek()) not in _DIGITS:
        return False
    yield from scan.skip(_DIGIT_RUN)
    return True


def _key(scan: Scanner) -> Reading[bool]:
    yield from scan.skip()
    if not (yield from json_string(scan)):
        return False
    yield from scan.skip()
    return (yield from scan.accept(":"))


def _scalar(scan: Scanner, char: str) -> Reading[bool]:
    if char in ("t", "f", "n"):
        return bool((yield from scan.match("true", "false", "null")))
    return (yield from _number(scan))


def _escape(scan: Scanner) -> Reading[bool]:
    char = yield from scan.peek()
    if char not in _ESCAPES:
        return False
    scan.advance()
    if char == "u":
        for _ in range(4):
            if (yield from scan.peek()) not in _HEX:
                return False
            scan.advance()
    return True

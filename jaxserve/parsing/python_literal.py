"""Reads Python literals as JSON: strings, numbers, True, False, None, lists and dicts."""

from __future__ import annotations

import json
import re

from jaxserve.parsing.json_text import is_json
from jaxserve.parsing.scanner import Reading, Scanner

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"[": "]", "{": "}"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_WORD = re.compile(r"[\w.+\-]+")
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


def python_literal(scan: Scanner) -> Reading[str]:
    """Reads one literal, and white space before it, and returns its JSON text.

    Returns "" at the first wrong character. Also accepts the constants and numbers of JSON.
    """
    parts: list[str] = []
    closing: list[str] = []  # brackets of the lists and dicts that are open
    while True:
        char = yield from scan.seek()
        if char in ("[", "{"):
            scan.advance()
            parts.append(char)
            closing.append(_CLOSING[char])
            is_first = True
        else:
            scalar = yield from _scalar(scan, char)
            if not scalar:
                return ""
            parts.append(scalar)
            is_first = False
        while closing:
            yield from scan.skip()
            is_next = is_first or (yield from scan.accept(","))
            yield from scan.skip()
            if (yield from scan.accept(closing[-1])):
                parts.append(closing.pop())
                is_first = False
                continue
            if not is_next:
                return ""
            parts.append("" if is_first else ", ")
            if closing[-1] == "}":
                key = yield from _key(scan)
                if not key:
                    return ""
                parts.append(key)
            break
        else:
            return "".join(parts)


def _key(scan: Scanner) -> Reading[str]:
    key = yield from _string(scan)
    yield from scan.skip()
    return f"{key}: " if key and (yield from scan.accept(":")) else ""


def _scalar(scan: Scanner, char: str) -> Reading[str]:
    if char in ("'", '"'):
        return (yield from _string(scan))
    word = yield from scan.run(_WORD)
    word = _CONSTANTS.get(word, word)
    return word if is_json(word) else ""


def _string(scan: Scanner) -> Reading[str]:
    quote = yield from scan.peek()
    if quote not in _PLAIN:
        return ""
    scan.advance()
    parts: list[str] = []
    while True:
        parts.append((yield from scan.run(_PLAIN[quote])))
        if (yield from scan.accept(quote)):
            break
        escape = yield from _escape(scan)
        if escape is None:
            return ""
        parts.append(escape)
    # The model may write the halves of a surrogate pair as two escapes. A lone half is replaced.
    units = "".join(parts).encode("utf-16-le", "surrogatepass")
    return json.dumps(units.decode("utf-16-le", "replace"), ensure_ascii=False)


def _escape(scan: Scanner) -> Reading[str | None]:
    """Reads an escape sequence and returns its character; None if it is missing or invalid."""
    if not (yield from scan.accept("\\")):
        return None
    char = yield from scan.peek()
    if not char:
        return None
    scan.advance()
    if char not in _NUM_HEX:
        return _ESCAPES.get(char, f"\\{char}")
    digits = ""
    while len(digits) < _NUM_HEX[char]:
        digit = yield from scan.peek()
        if digit not in _HEX:
            return None
        scan.advance()
        digits += digit
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF else None

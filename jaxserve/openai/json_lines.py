"""Encodes JSON for formats in which a line break ends a message."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode

# U+0085, U+2028 and U+2029. JSON escapes the line breaks of ASCII anyway. In UTF-8, these bytes are
# never part of other characters, and JSON has such characters only where escapes are allowed.
_LINE_BREAKS = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)


def encode_line(value: Any) -> bytes:
    """Returns a value as JSON without any character at which `str.splitlines` splits.

    Many clients split a stream of text with it, so a line break in a string would end a message.
    """
    return escape_line_breaks(_encode(value))


def escape_line_breaks(data: bytes) -> bytes:
    """Returns JSON, or a part of it that splits no character, as `encode_line` would write it."""
    if 0xC2 in data or 0xE2 in data:  # far cheaper than a search for two bytes
        for line_break, escape in _LINE_BREAKS:
            data = data.replace(line_break, escape)
    return data

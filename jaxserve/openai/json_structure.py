"""Counts what makes a JSON text slow to decode, while it is received.

The decoder holds the interpreter for its whole call, so the work of one call must be limited. Text
inside strings is copied and costs about 1 ns a byte. Structure is everything else: it becomes one
Python object for each value, and 8 MiB of it would take most of a second.
"""

from __future__ import annotations

OBJECT_BYTES = 8
"""What a string, an array or an object costs to create, in bytes of digits: each of its quotes, or
its opening bracket, counts this much more than one byte."""

MAX_DIGITS = 128
"""Most digits in a row. The decoder converts integers of any length, in quadratic time."""

_WHITE_SPACE = b" \t\r\n"
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)


class JsonStructure:
    """The structure of a JSON text that is given in pieces.

    The text need not be valid: what follows the first invalid byte is counted in some way, and the
    decoder does not read it.

    Attributes:
      size: bytes outside of strings and white space, plus `OBJECT_BYTES` for each quote, ``[`` and
        ``{``, plus a byte for each backslash.
      has_long_number: there are more than `MAX_DIGITS` digits in a row. Between two pieces, up to
        twice as many can stay unnoticed.
    """

    def __init__(self) -> None:
        self.size = 0
        self.has_long_number = False
        self._in_string = False
        self._escape = b""  # a backslash at the end of the last piece, if it escapes the next byte

    def add(self, piece: bytes) -> None:
        """Counts the next piece. Takes about 1 ns for a byte, and 50 ns for a string."""
        self.size += piece.count(b"\\")
        piece = self._escape + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._escape = b"\\" if num_backslashes % 2 else b""
        piece = piece.removesuffix(self._escape)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        num_quotes = len(parts) - 1
        # Every other part is outside of strings.
        outside = b"".join(parts[self._in_string :: 2]).translate(_DIGITS_TO_ZERO, _WHITE_SPACE)
        self._in_string ^= bool(num_quotes % 2)
        num_objects = num_quotes + outside.count(b"[") + outside.count(b"{")
        self.size += len(outside) + num_quotes + OBJECT_BYTES * num_objects
        self.has_long_number |= b"0" * (MAX_DIGITS + 1) in outside

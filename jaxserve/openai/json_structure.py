"""Counts how long a JSON text takes to decode, while it is received.

The decoder holds the interpreter for its whole call, so the work of one call must be limited. Most
of it is structure, which is everything outside of strings: each value becomes a Python object, and
8 MiB of brackets would take most of a second. Text is copied, which is fast if it is ASCII.
"""

from __future__ import annotations

COMMA_BYTES, QUOTE_BYTES, BRACKET_BYTES = 4, 12, 24
"""The weights of a comma, a quote, and ``[`` or ``{``, in addition to their byte. An object in
memory, a string, and a list or dict take as long to create as so many digits to convert: about 4 ns
each."""

BYTES_OF_ASCII, BYTES_OF_UTF8 = 16, 3
"""So many bytes of a text take as long as a digit: if all of it is ASCII, and if it is not."""

MAX_DIGITS = 128
"""Most digits in a row. The decoder converts integers of any length, in quadratic time."""

_WHITE_SPACE = b" \t\r\n"
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)


class JsonStructure:
    """The structure of a JSON text that is given in pieces.

    The text need not be valid: what follows the first invalid byte is counted in some way, and the
    decoder does not read it.

    Attributes:
      has_long_number: there are more than `MAX_DIGITS` digits in a row. Between two pieces, up to
        twice as many can stay unnoticed.
    """

    def __init__(self) -> None:
        self.has_long_number = False
        self._structure = 0
        self._num_bytes = 0
        self._is_ascii = True
        self._in_string = False
        self._escape = b""  # a backslash at the end of the last piece, if it escapes the next byte

    @property
    def size(self) -> int:
        """The time to decode the text so far, as a number of bytes.

        Bytes outside of strings and white space, quotes included, plus `COMMA_BYTES` for each comma
        there, `QUOTE_BYTES` for each quote, `BRACKET_BYTES` for each ``[`` and ``{``, a byte for
        each backslash and another one for each ``\\u``, and one for `BYTES_OF_ASCII` or
        `BYTES_OF_UTF8` bytes of the whole text.
        """
        per_byte = BYTES_OF_ASCII if self._is_ascii else BYTES_OF_UTF8
        return self._structure + self._num_bytes // per_byte

    def add(self, piece: bytes) -> None:
        """Counts the next piece. Takes about 1 ns for a byte, and 50 ns for a string."""
        self._structure += piece.count(b"\\")
        self._num_bytes += len(piece)
        self._is_ascii = self._is_ascii and piece.isascii()
        piece = self._escape + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._escape = b"\\" if num_backslashes % 2 else b""
        piece = piece.removesuffix(self._escape)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._structure += piece.count(b"\\u")
        parts = piece.split(b'"')
        num_quotes = len(parts) - 1
        # Every other part is outside of strings.
        outside = b"".join(parts[self._in_string :: 2]).translate(_DIGITS_TO_ZERO, _WHITE_SPACE)
        self._in_string ^= bool(num_quotes % 2)
        num_brackets = outside.count(b"[") + outside.count(b"{")
        self._structure += len(outside) + COMMA_BYTES * outside.count(b",")
        self._structure += (1 + QUOTE_BYTES) * num_quotes + BRACKET_BYTES * num_brackets
        self.has_long_number |= b"0" * (MAX_DIGITS + 1) in outside

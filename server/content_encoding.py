"""Decompresses the body of a request piece by piece, so that each piece has a limited size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException

from server.body_memory import CLOSE

PIECE_BYTES = 64 * 1024
"""Largest size of a piece of a decoded body, in bytes."""

SUPPORTED = ("gzip", "deflate")

GZIP_OR_ZLIB, RAW = 47, -15
"""Formats of `zlib`: one with a header that says which, and deflate without any header."""


class Plain:
    """A body that is not compressed."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the bytes that ``data``, the next part of the body, adds to the decoded body."""
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def finish(self) -> None:
        """Checks that the body is complete. Raises HTTPException."""


class Compressed:
    """A body in the formats gzip or zlib. ``deflate`` may also mean the format without a header.

    Both methods raise HTTPException for data that cannot be decompressed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""  # the first bytes, until there are two
        self._decoder: Any = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the bytes that ``data``, the next part of the body, adds to the decoded body."""
        if self._decoder is None:
            data = self._head = self._head + data
            if len(data) < 2:
                return
            is_raw = self._name == "deflate" and not _is_zlib(data)
            self._decoder = zlib.decompressobj(wbits=RAW if is_raw else GZIP_OR_ZLIB)
        while data:
            if self._decoder.eof:
                raise self._invalid("there are bytes after its end")
            piece = self._decompress(data)
            data = self._decoder.unconsumed_tail or self._decoder.unused_data
            yield piece
        # The decoder may still hold output although it has consumed all input.
        while not self._decoder.eof and (piece := self._decompress(b"")):
            yield piece

    def finish(self) -> None:
        """Checks that the body is complete. Raises HTTPException."""
        if self._decoder is None or not self._decoder.eof:
            raise self._invalid("it ends too early")

    def _decompress(self, data: bytes) -> bytes:
        try:
            return self._decoder.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, reason: str) -> HTTPException:
        message = f"the body is not valid {self._name}: {reason}"
        return HTTPException(400, message, CLOSE)


def _is_zlib(data: bytes) -> bool:
    """Returns whether data starts with a header of RFC 1950."""
    return data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0


def decoder_of(content_encoding: str) -> Plain | Compressed:
    """Returns a decoder for the value of a ``Content-Encoding`` header; "" is none.

    Raises HTTPException for an encoding that is not supported, or for several.
    """
    name = content_encoding.strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return Plain()
    if name in SUPPORTED:
        return Compressed(name)
    raise HTTPException(
        415,
        f"the Content-Encoding {content_encoding!r:.100} is not supported; "
        f"send the body as it is, or with one of {', '.join(SUPPORTED)}",
        {"Accept-Encoding": ", ".join(SUPPORTED), **CLOSE},
    )

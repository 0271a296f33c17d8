"""Encodes replies of any size in pieces, each of which holds the interpreter only for a short time.

With log probabilities or vectors, a reply can have millions of numbers. To encode it in one call
would stop all other requests for as long. So each entry becomes JSON text as soon as it is made,
which also takes a fraction of the memory of objects, and the whole is encoded in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import astuple, replace

T = TypeVar("T")

PIECE_VALUES = 16_384
"""Most numbers, strings and other values in a piece; encoding them takes about a millisecond."""

CHARS_PER_VALUE = 16
"""A string counts as a value, plus one for each of this many characters."""

MAX_DEPTH = 12
"""Replies are not nested deeper, except for what a request has brought, such as its metadata. The
limits of a body hold for that."""

_FIELD_VALUES = PIECE_VALUES // 8
"""Fields of a large struct that have more values than this are encoded on their own."""

_NUMBERS = frozenset({int, float, bool, type(None)})
_PLACEHOLDER = msgspec.Raw(b"\0")  # JSON has no such byte, not even in strings
_encode = msgspec.json.Encoder().encode


def as_json(value: T) -> T:
    """Returns the JSON text of a part of a reply, which stands for it in the reply.

    For entries that there may be many of: as objects, a million numbers take hundreds of MiB, and
    Python's collector of garbage 100 ms in one go.
    """
    return cast(T, msgspec.Raw(b"".join(encode_pieces(value))))


def encode_pieces(value: Any, *, max_depth: int = MAX_DEPTH) -> Iterator[bytes]:
    """Yields the JSON of a struct, list, dict or scalar in pieces: one if it is small.

    The joined pieces are what ``msgspec.json.encode`` returns. A piece never ends inside a
    character, except in a `msgspec.Raw`. What is nested more than ``max_depth`` deep is never cut.
    """
    if max_depth == 0 or fits(value):
        yield _encode(value)
    elif isinstance(value, str):
        step = PIECE_VALUES * CHARS_PER_VALUE
        yield b'"'
        for start in range(0, len(value), step):
            yield _encode(value[start : start + step])[1:-1]
        yield b'"'
    elif isinstance(value, list):
        yield b"["
        yield from _list_pieces(value, max_depth - 1)
        yield b"]"
    elif isinstance(value, msgspec.Raw):
        data = bytes(value)
        step = PIECE_VALUES * CHARS_PER_VALUE
        yield from (data[start : start + step] for start in range(0, len(data), step))
    elif isinstance(value, dict):
        yield b"{"
        yield from _dict_pieces(value, max_depth - 1)
        yield b"}"
    else:
        yield from _struct_pieces(value, max_depth - 1)


def fits(value: Any) -> bool:
    """Returns whether a value is encoded in one piece."""
    return _room_after(value, PIECE_VALUES) >= 0


def _room_after(value: Any, room: int) -> int:
    """Returns ``room`` less the number of values in ``value``. Stops when that is negative."""
    left = [value]
    while left and room >= 0:
        value = left.pop()
        kind = type(value)
        room -= 1
        if kind in _NUMBERS:
            continue
        if kind is str:
            room -= len(value) // CHARS_PER_VALUE
        elif kind is msgspec.Raw:
            room -= len(bytes(value)) // CHARS_PER_VALUE
        elif kind is list:
            is_numbers = value and type(value[0]) in _NUMBERS and type(value[-1]) in _NUMBERS
            if is_numbers or len(value) > room:
                room -= len(value)
            else:
                left += value
        elif kind is dict:
            room -= len(value)  # the keys
            if room >= 0:
                left += value.values()
        elif isinstance(value, msgspec.Struct):
            left += astuple(value)
    return room


def _list_pieces(values: list[Any], max_depth: int) -> Iterator[bytes]:
    start, separator = 0, b""
    while start < len(values):
        end = _end_of_group(values, start)
        if end > start:
            yield separator + _encode(values[start:end])[1:-1]
        else:
            yield separator
            yield from encode_pieces(values[start], max_depth=max_depth)
            end = start + 1
        start, separator = end, b","


def _dict_pieces(values: dict[Any, Any], max_depth: int) -> Iterator[bytes]:
    keys, members = list(values), list(values.values())
    start, separator = 0, b""
    while start < len(keys):
        end = _end_of_group(members, start)
        if end > start:
            group = dict(zip(keys[start:end], members[start:end], strict=True))
            yield separator + _encode(group)[1:-1]
        else:
            yield separator + _encode({keys[start]: _PLACEHOLDER})[1:-2]
            yield from encode_pieces(members[start], max_depth=max_depth)
            end = start + 1
        start, separator = end, b","


def _end_of_group(values: list[Any], start: int) -> int:
    """Returns the end of the longest group from ``start`` that makes a piece; empty if none does.

    Each value counts as one more, so that the sizes of keys and brackets count too.
    """
    room = PIECE_VALUES
    end = start
    while end < len(values) and (room := _room_after(values[end], room - 1)) >= 0:
        end += 1
    return end


def _struct_pieces(value: msgspec.Struct, max_depth: int) -> Iterator[bytes]:
    # msgspec encodes the struct, as it alone knows which fields are left out and which tags added.
    fields = zip(value.__struct_fields__, astuple(value), strict=True)
    large = {name: field for name, field in fields if _room_after(field, _FIELD_VALUES) < 0}
    rest = _encode(replace(value, **dict.fromkeys(large, _PLACEHOLDER)))
    head, *tails = rest.split(b"\0")
    yield head
    for field, tail in zip(large.values(), tails, strict=True):
        yield from encode_pieces(field, max_depth=max_depth)
        yield tail

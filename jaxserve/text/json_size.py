"""The size of a JSON value, and JSON text without long calls into C.

A call into C that takes long stops every thread of the process, and so the event loop of the front.
Python code in a thread does not: it gives way every few milliseconds.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_AT_ONCE = 100_000
"""Values of at most this size become JSON text in one call, which takes a few milliseconds."""


def size_of(value: Any, most: int) -> int:
    """Returns the characters of all strings in a value, plus 1 for each value and each key.

    Stops when the size exceeds ``most``, and returns the size so far: the time is at most
    proportional to ``most``.

    Args:
      value: a JSON value, or a struct of JSON values; fields that are None do not count.
      most: the largest size that has to be exact.
    """
    size = 0
    rest = [value]
    while rest and size <= most:
        item = rest.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += len(item)
            if size <= most:
                rest += item.values()
                size += sum(len(key) for key in item if isinstance(key, str))
        elif isinstance(item, list | tuple):
            size += len(item)
            if size <= most:
                size -= len(item)  # each value counts when its turn comes
                rest += item
        elif isinstance(item, msgspec.Struct):
            fields = [getattr(item, name) for name in item.__struct_fields__]
            rest += [field for field in fields if field is not None]
    return size


def dumps(value: Any, **options: Any) -> str:
    """Does the same as `json.dumps`. The text of a large value is made by Python code, in parts."""
    if size_of(value, MAX_AT_ONCE) <= MAX_AT_ONCE:
        return json.dumps(value, **options)
    return "".join(json.JSONEncoder(**options).iterencode(value))

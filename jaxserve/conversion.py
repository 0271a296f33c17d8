"""Converts the values that Python programs pass to the types that fields declare."""

from __future__ import annotations

import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec


def plain(value: Any) -> Any:
    """Returns a value made of None, bool, int, float, str, list and dict, where that is possible.

    Numbers and strings of subclasses and of NumPy become those of Python, arrays and every other
    iterable a list. Bytes, structs and unknown objects stay as they are.
    """
    match value:
        case bool() | None | bytes() | bytearray() | msgspec.Struct():
            return value
        case str():
            return str.__str__(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case Mapping():
            return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays of any library, and other scalars of NumPy
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, Iterable) else value


def converted(value: Any, form: Any) -> Any:
    """Returns a value as the type ``form``, in which integers and floats are different types.

    Raises:
      msgspec.ValidationError: the value is of another type.
    """
    return msgspec.convert(plain(value), form)


def types_of(form: Any) -> frozenset[type]:
    """Returns the types that an annotation allows, without those of their items."""
    is_union = typing.get_origin(form) in (typing.Union, types.UnionType)
    options = typing.get_args(form) if is_union else (form,)
    names = [typing.get_origin(option) or option for option in options]
    return frozenset(str if name is Literal else name for name in names)

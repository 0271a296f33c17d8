"""The prompts in the field of a request: a string, token IDs, or a list of either."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import json_type, with_integers, wrong_type
from jaxserve.sampling_params import IDS_AT_ONCE

MAX_PROMPTS = 2048

Prompt = str | list[int]

_FORMS = "a string, a list of token ids, or a list of either"


def num_prompts(value: Any, *, param: str = "prompt") -> int:
    """Returns how many prompts a field holds; looks at no more than the first.

    Raises:
      InvalidRequestError: the field holds no list and no string, or too many prompts.
    """
    if isinstance(value, str):
        return 1
    if not isinstance(value, list):
        given = "nothing" if value is None else json_type(value)
        raise InvalidRequestError(f"{param} must be {_FORMS}, got {given}", param=param)
    if not value:
        raise InvalidRequestError(f"{param} cannot be empty", param=param)
    if json_type(value[0]) in ("int", "float"):
        return 1
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"{param}: at most {MAX_PROMPTS} prompts in a request, got {len(value)}", param=param
        )
    return len(value)


def completion_prompts(value: Any, *, param: str = "prompt") -> list[Prompt]:
    """Returns the prompts in the field ``param``, all strings or all token IDs.

    Raises:
      InvalidRequestError: the field holds something else; names the field.
    """
    num_prompts(value, param=param)
    if isinstance(value, str):
        return [value]
    first = json_type(value[0])
    if first in ("int", "float"):
        return [_converted(value, int, param, param)]
    if first == "str":
        return _converted(value, str, param, param)
    if first == "array":
        for i, ids in enumerate(value):
            if not isinstance(ids, list):
                _check_each([ids], list[int], param, param, first=i)
        return [_converted(ids, int, param, f"{param}[{i}]") for i, ids in enumerate(value)]
    raise InvalidRequestError(f"{param} must be {_FORMS}, got a list of {first}", param=param)


def _converted(values: list[Any], form: Any, param: str, path: str, *, first: int = 0) -> list[Any]:
    """Returns a list of values of type ``form``; one of another type is an error of ``param``.

    A long list is checked in parts: a single call would stop all other threads.

    Args:
      values: the list.
      form: the type of each value.
      param: the field.
      path: the list within the field.
      first: the index in ``path`` of the first value.
    """
    found: list[Any] = []
    for start in range(0, len(values), IDS_AT_ONCE):
        part = values[start : start + IDS_AT_ONCE]
        try:
            found += msgspec.convert(part, list[form])
        except msgspec.ValidationError:
            part = with_integers(part, list[form])
            _check_each(part, form, param, path, first=first + start)
            found += part
    return found


def _check_each(values: list[Any], form: Any, param: str, path: str, *, first: int) -> None:
    """Raises InvalidRequestError if a value is not of type ``form``. Names the first such value."""
    for i, value in enumerate(values, first):
        try:
            msgspec.convert(value, form)
        except msgspec.ValidationError as error:
            place = wrong_type(error, form, under=f"{path}[{i}]")
            raise InvalidRequestError(
                f"{param} must be {_FORMS}: {place.message}", param=param
            ) from error

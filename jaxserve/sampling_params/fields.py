"""The limits of sampling parameters, and the checks of their fields."""

from __future__ import annotations

import math
import reprlib
import sys
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from jaxserve.conversion import converted, types_of
from jaxserve.errors import InvalidRequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
ALL_LOGPROBS = -1
"""The count that asks for log probabilities of the whole vocabulary."""
MAX_LOGIT_BIAS = 2**18
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
BIAS_LIMIT = 100.0
"""Larger biases act like this one, as in the OpenAI API."""
IDS_AT_ONCE = 2**16
"""Number of token IDs that one call checks. No other thread can interrupt it, for about 2 ms."""
INT64 = (-(2**63), 2**63 - 1)
MAX_ID_DIGITS = 20
"""Digits of a token ID in a string. Python refuses to convert thousands of digits."""


class Range(NamedTuple):
    """The least and the most value of a field; words that tell the range, "" for the numbers."""

    low: float
    high: float
    words: str = ""


# The least number above 0, and the largest one that is finite. NaN is in no range.
_ABOVE_0, _FINITE = math.ulp(0.0), sys.float_info.max
_COUNT = Range(ALL_LOGPROBS, INT64[1], f"at least 0, or {ALL_LOGPROBS} for all tokens")

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "n": Range(1, MAX_N),
        "temperature": Range(0, _FINITE),
        "top_p": Range(_ABOVE_0, 1, "greater than 0 and at most 1"),
        "top_k": Range(-1, INT64[1], f"-1 or 0 (off) or between 1 and {INT64[1]}"),
        "min_p": Range(0, 1),
        "seed": Range(*INT64),
        "max_tokens": Range(1, INT64[1]),
        "min_tokens": Range(0, INT64[1]),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "repetition_penalty": Range(_ABOVE_0, _FINITE, "a finite number greater than 0"),
        "logprobs": _COUNT,
        "prompt_logprobs": _COUNT,
    }
)
"""The ranges of all fields that are numbers."""

FORMS: Mapping[str, str] = MappingProxyType(
    {
        "stop": "a string or a list of strings",
        "stop_token_ids": "a list of token IDs",
        "logit_bias": "a dict of token IDs and numbers",
        "allowed_token_ids": "a list of token IDs",
        "bad_words_token_ids": "a list of lists of token IDs",
        "grammar": "a Grammar",
        "extra_args": "a dict whose keys are strings",
        "pooling": "'last' or 'mean'",
    }
)
"""The valid values of all other fields, in words."""


def as_field(name: str, value: Any, form: Any) -> Any:
    """Returns the value of a field as its type. Raises InvalidRequestError."""
    if name == "stop" and isinstance(value, str):
        value = (value,)
    if value is None and typing.get_origin(form) is tuple:
        value = ()
    if name == "logit_bias" and isinstance(value, Mapping):
        # JSON has strings as keys.
        value = {_as_id(key): bias for key, bias in value.items()}
    try:
        return converted(value, form)
    except (msgspec.ValidationError, RecursionError):  # the second: it is nested too deeply
        nouns = {int: "an integer", float: "a number", bool: "true or false"}
        expected = FORMS.get(name) or next(nouns[t] for t in types_of(form) if t in nouns)
        got = reprlib.repr(value)  # shortens long values
        raise InvalidRequestError(f"{name} must be {expected}, got {got}", param=name) from None


def _as_id(key: Any) -> Any:
    """Returns the token ID in a string of digits; any other value as it is."""
    is_id = isinstance(key, str) and key.isdecimal() and len(key) <= MAX_ID_DIGITS
    return int(key) if is_id else key


def range_words(name: str, value: float) -> str:
    """Returns what the value of a field must be, given a value that is out of its range."""
    low, high, words = RANGES[name]
    if not words and low >= 0 and high in (_FINITE, INT64[1]):
        return f"at most {high}" if value > high else f"at least {low}"
    return words or f"between {low} and {high}"


def require(ok: bool, param: str, expected: str, got: object) -> None:
    """Raises InvalidRequestError for field ``param`` unless its value is valid."""
    if not ok:
        raise InvalidRequestError(f"{param} must be {expected}, got {got!r}", param=param)


def require_at_most(param: str, count: int, most: int, unit: str) -> None:
    """Raises InvalidRequestError for field ``param`` if it has too many items."""
    require(count <= most, param, f"at most {most} {unit}", count)

"""The parameters that stages of the sampler declare, and the check of the values in a request.

An engine reports the parameters of its stages when it starts (`Ready.parameters`). So the front
checks requests without importing any stage.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.errors import ConfigError, InvalidRequestError

MAX_CHARS = 1000
"""Longest string that a parameter accepts."""

INT32 = (-(2**31), 2**31 - 1)
FLOAT32_MAX = 3.4e38

_NOUNS = {
    "float": ("a number", "numbers"),
    "int": ("an integer", "integers"),
    "bool": ("true or false", "booleans"),
    "str": ("a string", "strings"),
    "token": ("a token ID", "token IDs"),
}


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """A parameter of a request that a stage declares.

    Attributes:
      name: its key in `SamplingParams.extra_args`, a Python identifier.
      kind: the type of the value, or of each value of a list. An "int" has 32 bits, and a "token"
        is in ``[0, V)``.
      default: the value of requests that do not set the parameter.
      low, high: the range of a "float" or "int", both included.
      choices: the allowed strings of a "str"; empty for any string of up to `MAX_CHARS` characters.
      most: None for one value. Otherwise the value is a list with at most this many values, at
        least 1.

    Raises:
      ConfigError: a field has the wrong type, or the declaration contradicts itself.
    """

    name: str
    kind: Literal["float", "int", "bool", "str", "token"]
    default: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    most: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _NOUNS:
            expected = ", ".join(_NOUNS)
            raise ConfigError(
                f"the kind of parameter {self.name!r} must be one of {expected}, got {self.kind!r}"
            )
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError(f"a parameter must have an identifier as name, got {self.name!r}")
        self._check_limits()
        try:
            default = self.checked(self.default, INT32[1], field="its default")
        except InvalidRequestError as error:
            raise ConfigError(f"parameter {self.name}: {error}") from error
        # In the same form as the values of requests: the default 0 of a "float" becomes 0.0.
        msgspec.structs.force_setattr(self, "default", default)

    def _check_limits(self) -> None:
        """Raises ConfigError unless the fields that limit the value fit each other."""
        are_numbers = all(_is_number(limit) for limit in (self.low, self.high))
        # Comparisons with NaN are false.
        if not are_numbers or not self.low <= self.high:
            raise ConfigError(
                f"low and high of parameter {self.name} must be numbers, and low at most high, got "
                f"{self.low!r} and {self.high!r}"
            )
        are_strings = isinstance(self.choices, tuple) and all(
            isinstance(choice, str) for choice in self.choices
        )
        if not are_strings or (self.choices and self.kind != "str"):
            raise ConfigError(
                f"choices of parameter {self.name} must be a tuple of strings, and only a "
                f'parameter of kind "str" may have any, got {self.choices!r} for {self.kind!r}'
            )
        if self.most is not None and not (is_integer(self.most) and self.most >= 1):
            raise ConfigError(
                f"most of parameter {self.name} must be None or an integer of at least 1, got "
                f"{self.most!r}"
            )

    def checked(self, value: Any, vocab_size: int, *, field: str) -> Any:
        """Returns a valid value; integers for a "float" become floats.

        Raises:
          InvalidRequestError: the value, for field ``field``, is invalid.
        """
        is_list = isinstance(value, list | tuple)
        values = value if is_list else [value]
        most = 1 if self.most is None else self.most
        is_form_ok = is_list == (self.most is not None) and len(values) <= most
        if not is_form_ok or not all(self._allows(one, vocab_size) for one in values):
            got = reprlib.repr(value)  # shortens long values
            raise InvalidRequestError(
                f"{field} must be {self._expected(vocab_size)}, got {got}", param=field
            )
        if self.kind == "float":
            values = [float(one) for one in values]
        return list(values) if is_list else values[0]

    def _allows(self, value: Any, vocab_size: int) -> bool:
        """Whether this is a valid value, or a valid value of a list. Nothing is converted."""
        match self.kind:
            case "bool":
                return isinstance(value, bool)
            case "str":
                is_short = isinstance(value, str) and len(value) <= MAX_CHARS
                return is_short and (not self.choices or value in self.choices)
            case "float":
                # Comparisons with NaN are false.
                is_finite = _is_number(value) and -FLOAT32_MAX <= value <= FLOAT32_MAX
                return is_finite and self.low <= value <= self.high
            case _:
                low, high = (0, vocab_size - 1) if self.kind == "token" else INT32
                is_in_range = is_integer(value) and low <= value <= high
                return is_in_range and self.low <= value <= self.high

    def _expected(self, vocab_size: int) -> str:
        """Describes the valid values."""
        one, several = _NOUNS[self.kind]
        text = one if self.most is None else f"a list of at most {self.most} {several}"
        low, high = self.low, self.high
        if self.kind in ("int", "token"):
            least, most = (0, vocab_size - 1) if self.kind == "token" else INT32
            low, high = max(least, low), min(most, high)
        if self.choices:
            text += f", one of {', '.join(map(repr, self.choices))}"
        elif self.kind == "str":
            text += f" of at most {MAX_CHARS} characters"
        elif self.kind != "bool" and math.isfinite(low) and math.isfinite(high):
            text += f" between {low} and {high}"
        elif self.kind == "float" and math.isfinite(low):
            text += f" of at least {low}"
        elif self.kind == "float" and math.isfinite(high):
            text += f" of at most {high}"
        return text


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer, which a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_arguments(
    given: Mapping[str, Any] | None,
    parameters: Sequence[Parameter],
    vocab_size: int,
    *,
    field: str,
) -> dict[str, Any] | None:
    """Returns the values that differ from the defaults of the parameters; None if none does.

    None and the default both mean the same as no value, so a request that sets them costs no more
    than one without them, and may have drafts.

    Args:
      given: name of the parameter -> value. None stands for no value, under any name.
      parameters: the parameters of the engine.
      vocab_size: the width of the logits.
      field: the field that holds ``given``, for messages.

    Raises:
      InvalidRequestError: no stage has this parameter, or the value is invalid.
    """
    if not given:
        return None
    known = {parameter.name: parameter for parameter in parameters}
    checked = {}
    for name, value in given.items():
        if value is None:
            continue
        path = f"{field}.{name[:100]}"
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "none"
            raise InvalidRequestError(
                f"{path}: no stage of this server has such a parameter; expected {expected}",
                param=path,
            )
        valid = known[name].checked(value, vocab_size, field=path)
        if valid != known[name].default:
            checked[name] = valid
    return checked or None

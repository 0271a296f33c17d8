"""Declares settings: fields of dataclasses that are also flags, with the numbers they may have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``.

    Attributes:
      text: the range in words, which follow "must be".
      low: the smallest number.
      high: the largest number.
      above_low: whether ``low`` itself is not in the range.
      has_infinity: whether infinity is in the range.
    """

    text: str
    low: float
    high: float = math.inf
    above_low: bool = False
    has_infinity: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` is a number of the range; NaN is in none."""
        if not isinstance(value, int | float) or (self.above_low and value == self.low):
            return False
        return self.low <= value <= self.high and (self.has_infinity or value != math.inf)


def at_least(low: float, why: str = "") -> Range:
    """Returns the range of all numbers from ``low``. ``why`` explains the limit."""
    return Range(f"at least {low:g}" + (f" ({why})" if why else ""), low)


def between(low: float, high: float) -> Range:
    """Returns the range from ``low`` to ``high``, both included."""
    return Range(f"between {low:g} and {high:g}", low, high)


POSITIVE = Range("more than 0", 0, above_low=True)


def setting(default: Any, help: str, *, alias: str = "", range: Range | None = None) -> Any:
    """Declares a field that is also a command line flag, with its help text.

    The range and the default are appended to the flag's help. If the default is None or empty,
    ``help`` must describe it. ``alias`` is a second name of the flag, such as "--model-path". A
    number has a ``range``, which `check_ranges` checks; None as a value is in every range.
    """
    return field(default=default, metadata={"help": help, "alias": alias, "range": range})


def check_ranges(settings: Any) -> None:
    """Raises ConfigError if a number of a dataclass of settings is not in its range."""
    for each in fields(settings):
        value, allowed = getattr(settings, each.name), each.metadata["range"]
        if value is None or allowed is None or value in allowed:
            continue
        finite = " and finite" if value == math.inf else ""
        flag = "--" + each.name.replace("_", "-")
        raise ConfigError(f"{flag} must be {allowed.text}{finite}, got {value!r}")

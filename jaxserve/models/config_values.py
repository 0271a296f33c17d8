"""Reads single values of config.json, which can be of any type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
"""Sizes above these limits mean that config.json is damaged."""


def size(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Returns a whole number in [``least``, `MAX_SIZE`]; null counts as missing.

    Raises:
      CheckpointError: the value is no such number, or it is missing and has no default.
    """
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(
            f"{key} in config.json must be a whole number, at least {least}, got {value!r:.100}"
        )
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    if value > most:
        raise CheckpointError(f"{key} in config.json must be at most {most}, got {value}")
    return value


def real(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a finite number above 0, which may be written as a string; null counts as missing.

    Raises:
      CheckpointError: the value is no such number.
    """
    value = optional_real(config, key)
    return default if value is None else value


def optional_real(config: Mapping[str, Any], key: str) -> float | None:
    """Returns a finite number above 0, as `real` does, or None if it is null or missing."""
    value = config.get(key)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise CheckpointError(f"{key} in config.json must be a number above 0, got {value!r:.100}")
    return number


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Returns true or false; null counts as missing. Raises CheckpointError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} in config.json must be true or false, got {value!r:.100}")
    return default if value is None else value


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object, which is empty if it is null or missing.

    Raises:
      CheckpointError: the value is no object.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{key} in config.json must be an object, got {value!r:.100}")
    return value or {}


def optional_strings(config: Mapping[str, Any], key: str) -> list[str] | None:
    """Returns a list of strings, or None if it is null or missing.

    Raises:
      CheckpointError: the value is no such list.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CheckpointError(f"{key} in config.json must be a list of strings, got {value!r:.100}")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """Returns the size of a head, which is even. Raises CheckpointError if it is not."""
    default = size(config, "hidden_size") // size(config, "num_attention_heads")
    dim = size(config, "head_dim", default)
    if dim % 2:
        raise CheckpointError(f"head_dim in config.json must be even, got {dim}")
    return dim

"""Reads rotary embeddings from config.json, in the form of any version of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.config_values import MAX_SIZE, head_dim, mapping, real, size
from jaxserve.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

LEAST, MOST = 1e-6, 1e6
"""The range of the parameters. No model needs others, and far beyond float32 overflows."""

MAX_THETA = 1e30
ORIGINAL_LENGTH = "original_max_position_embeddings"


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope_parameters (transformers 5) or rope_scaling with rope_theta (older versions)."""
    given = dict(mapping(config, "rope_scaling") or mapping(config, "rope_parameters"))
    nested = [
        key
        for key, value in given.items()
        if isinstance(value, Mapping) or key in ("full_attention", "sliding_attention")
    ]
    if nested:
        raise UnsupportedModelError(
            f"rotary embeddings that differ between layers ({', '.join(nested)}) are not supported"
        )
    given["rope_theta"] = theta(given, "rope_theta", theta(config, "rope_theta", 10000.0))
    return given


def theta(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the base of the frequencies, above 1; null counts as missing.

    Raises:
      CheckpointError: the value is no such number.
    """
    value = real(config, key, default)
    if not 1 < value <= MAX_THETA:
        raise CheckpointError(
            f"{key} in config.json must be a number above 1, at most {MAX_THETA:g}, got {value:g}"
        )
    return value


def rope(given: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """Reads one rotation.

    Args:
      given: its parameters, with ``rope_theta``.
      config: the settled config.json.

    Raises:
      CheckpointError: a parameter is missing or invalid.
      UnsupportedModelError: the kind of rotation is not implemented.
    """
    size_of_head, max_positions = head_dim(config), size(config, "max_position_embeddings")
    kind = given.get("rope_type") or given.get("type") or "default"
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; only 1.0 is"
        )
    original = _original_length(given, config, max_positions)
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(_number(given, "factor"))
        case "dynamic":
            if size_of_head <= 2:
                raise CheckpointError(f"dynamic rope needs a head_dim above 2, got {size_of_head}")
            scaling = DynamicScaling(_number(given, "factor"), max_positions)
        case "llama3":
            scaling = _llama3(given, original)
        case "yarn":
            scaling = _yarn(given, original, max_positions)
        case "factors":
            scaling = FactorScaling(_factors(given, size_of_head))
        case _:
            raise UnsupportedModelError(
                f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
    return Rope(theta=given["rope_theta"], head_dim=size_of_head, scaling=scaling)


def _original_length(
    given: Mapping[str, Any], config: Mapping[str, Any], max_positions: int
) -> int:
    """Returns the context of the original training in tokens, which some files write as 8192.0."""
    both = (config.get(ORIGINAL_LENGTH), given.get(ORIGINAL_LENGTH))
    original = next((value for value in both if value is not None), max_positions)
    if isinstance(original, float) and original.is_integer():
        original = int(original)
    return size({ORIGINAL_LENGTH: original}, ORIGINAL_LENGTH)


def _number(given: Mapping[str, Any], key: str) -> float:
    return _in_range(given.get(key), key)


def _in_range(value: Any, key: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST <= value <= MOST:
        raise CheckpointError(
            f"{key} in the rope parameters of config.json must be a number from {LEAST:g} to "
            f"{MOST:g}, got {value!r:.100}"
        )
    return float(value)


def _nonzero(given: Mapping[str, Any], key: str) -> float | None:
    """Returns a number; None if it is 0, null or missing, which `transformers` takes as equal."""
    value = given.get(key)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    return _in_range(value, key)


def _factors(given: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Reads the rope type that only GGUF files have; see `checkpoint.gguf_config.hf_config`."""
    values = given.get("factors")
    if not isinstance(values, list):
        raise CheckpointError(
            "factors in the rope parameters of config.json must be a list of numbers, got "
            f"{values!r:.100}"
        )
    factors = tuple(_in_range(value, "each of the factors") for value in values)
    if len(factors) != head_dim // 2:
        raise CheckpointError(
            f"there must be {head_dim // 2} rope factors, half of head_dim {head_dim}, "
            f"got {len(factors)}"
        )
    return factors


def _llama3(given: Mapping[str, Any], original: int) -> Llama3Scaling:
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"high_freq_factor in the rope parameters of config.json ({high}) must be above "
            f"low_freq_factor ({low})"
        )
    return Llama3Scaling(_number(given, "factor"), low, high, original)


def _yarn(given: Mapping[str, Any], original: int, max_positions: int) -> YarnScaling:
    """Reads the parameters of YaRN, with the defaults of `transformers`."""
    has_factor = given.get("factor") is not None
    factor = _number(given, "factor") if has_factor else max_positions / original

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = _nonzero(given, "mscale"), _nonzero(given, "mscale_all_dim")
    if given.get("attention_factor") is not None:
        attention_factor = _number(given, "attention_factor")
    elif mscale and mscale_all:
        attention_factor = magnitude(mscale) / magnitude(mscale_all)
    else:
        attention_factor = magnitude(1.0)
    fast, slow = _nonzero(given, "beta_fast") or 32.0, _nonzero(given, "beta_slow") or 1.0
    if fast < slow:
        raise CheckpointError(
            f"beta_fast in the rope parameters of config.json ({fast}) must be at least beta_slow "
            f"({slow})"
        )
    return YarnScaling(
        factor=factor,
        original_length=original,
        attention_factor=attention_factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(given.get("truncate", True)),
    )


def context_length(scaling: Scaling | None, max_positions: int) -> int:
    """Returns the longest context in tokens, which a scaling may extend past ``max_positions``.

    Raises:
      CheckpointError: the scaling makes the context impossibly short or long.
    """
    match scaling:
        case LinearScaling(factor) | DynamicScaling(factor):
            length = int(factor * max_positions)
        case YarnScaling():
            length = max(max_positions, int(scaling.factor * scaling.original_length))
        case _:
            length = max_positions
    if not 1 <= length <= MAX_SIZE:
        raise CheckpointError(
            f"factor in the rope parameters of config.json must scale the context of "
            f"{max_positions} tokens to at least 1 and at most {MAX_SIZE} tokens, got {length}"
        )
    return length

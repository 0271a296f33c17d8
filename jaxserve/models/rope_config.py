"""Reads rotary embeddings from config.json, in the form of any version of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.config_values import head_dim, real, size
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


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope_parameters (transformers 5) or rope_scaling with rope_theta (older versions)."""
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"rotary embeddings that differ between layers ({', '.join(nested)}) are not supported"
        )
    given["rope_theta"] = real(given, "rope_theta", real(config, "rope_theta", 10000.0))
    return given


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
    original = (
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or max_positions
    )
    if not isinstance(original, int | float):
        raise CheckpointError(
            f"original_max_position_embeddings must be a number, got {original!r:.100}"
        )
    original = int(original)
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(_number(given, "factor"))
        case "dynamic":
            scaling = DynamicScaling(_number(given, "factor"), max_positions)
        case "llama3":
            scaling = Llama3Scaling(
                factor=_number(given, "factor"),
                low_freq_factor=_number(given, "low_freq_factor"),
                high_freq_factor=_number(given, "high_freq_factor"),
                original_length=original,
            )
        case "yarn":
            scaling = _yarn(given, original, max_positions)
        case "factors":
            scaling = FactorScaling(_factors(given, size_of_head))
        case _:
            raise UnsupportedModelError(
                f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
    return Rope(theta=given["rope_theta"], head_dim=size_of_head, scaling=scaling)


def _number(given: Mapping[str, Any], key: str) -> float:
    if not isinstance(given.get(key), int | float):
        raise CheckpointError(
            f"{key} in the rope parameters of config.json must be a number, got "
            f"{given.get(key)!r:.100}"
        )
    return float(given[key])


def _factors(given: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Reads the rope type that only GGUF files have; see `checkpoint.gguf_config.hf_config`."""
    factors = tuple(map(float, given["factors"]))
    if len(factors) != head_dim // 2:
        raise CheckpointError(
            f"there must be {head_dim // 2} rope factors, half of head_dim {head_dim}, "
            f"got {len(factors)}"
        )
    return factors


def _yarn(given: Mapping[str, Any], original: int, max_positions: int) -> YarnScaling:
    """Reads the parameters of YaRN, with the defaults of `transformers`."""
    factor = given.get("factor") or max_positions / original

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = given.get("attention_factor")
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all:
        attention_factor = magnitude(mscale) / magnitude(mscale_all)
    elif attention_factor is None:
        attention_factor = magnitude(1.0)
    return YarnScaling(
        factor=float(factor),
        original_length=original,
        attention_factor=float(attention_factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )


def context_length(scaling: Scaling | None, max_positions: int) -> int:
    """Returns the longest context in tokens, which a scaling may extend past ``max_positions``."""
    match scaling:
        case LinearScaling(factor) | DynamicScaling(factor):
            return int(factor * max_positions)
        case YarnScaling():
            return max(max_positions, int(scaling.factor * scaling.original_length))
        case _:
            return max_positions

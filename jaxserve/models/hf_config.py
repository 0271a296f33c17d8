"""Reads config.json into a `ModelSpec`.

Two other modules know its keys: `checkpoint.gguf_config` writes them, and
`front.generation_defaults` reads the end tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.registry import model_class
from jaxserve.models.spec import ModelSpec
from jaxserve.ops import rope
from jaxserve.ops.elementwise import ACTIVATIONS

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Sizes above these limits mean that config.json is damaged."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

NULL_HAS_A_MEANING = ("sliding_window", "head_dim")
"""Keys for which null does not mean the same as a missing key."""


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Reads a config.json as any version of transformers writes it.

    Raises:
      UnsupportedModelError: the architecture or a variant of it is not implemented.
      CheckpointError: a key is missing, or sizes do not fit together.
    """
    try:
        return _read(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value can have any type, so reading it can fail in many ways.
        raise CheckpointError(
            f"config.json cannot be understood ({type(error).__name__}: {error!s:.200})"
        ) from error


def _read(config: Mapping[str, Any]) -> ModelSpec:
    architecture = _architecture(config)
    family = model_class(architecture)
    given = {
        key: value
        for key, value in config.items()
        if value is not None or key in NULL_HAS_A_MEANING
    }
    config = {**family.HF_DEFAULTS, **given, **family.HF_FIXED}
    _check_supported(config)
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers")
    head_dim = _size(config, "head_dim", hidden_size // num_heads)
    activation = config.get("hidden_act", "silu")
    max_positions = _size(config, "max_position_embeddings")
    rotation = _rope(config, head_dim, max_positions)
    attention_bias = bool(config.get("attention_bias", False))
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        activation=activation,
        norm_eps=_real(config, "rms_norm_eps", 1e-6),
        rope=rotation,
        windows=_windows(config, num_layers),
        qkv_bias=attention_bias,
        attention_output_bias=bool(config.get("attention_output_bias", attention_bias)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=bool(config.get("qk_norm", False)),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        context_length=_context_length(rotation.scaling, max_positions),
    )
    _check_sizes(spec)
    return spec


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f'config.json must name one model in "architectures", got {names!r}')
    return names[0]


def _check_supported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        raise UnsupportedModelError(
            f"weights quantised with {method} are not supported; use a float checkpoint, or GGUF"
        )
    for key in ("num_local_experts", "num_experts"):
        if config.get(key):
            raise UnsupportedModelError(
                f"mixtures of experts are not supported ({key} is {config[key]}); "
                "only dense models are"
            )
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; only 1.0 is"
        )


def _check_sizes(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({spec.num_heads}) must be a multiple of num_key_value_heads "
            f"({spec.num_kv_heads})"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"head_dim must be even, got {spec.head_dim}")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns a whole number in [1, `MAX_SIZE`]; null counts as missing."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"{key} in config.json must be a whole number above 0, got {value!r:.100}"
        )
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    if value > most:
        raise CheckpointError(f"{key} in config.json must be at most {most}, got {value}")
    return value


def _real(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a finite number above 0, which may be written as a string."""
    value = config.get(key)
    value = default if value is None else value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise CheckpointError(f"{key} in config.json must be a number above 0, got {value!r}")
    return number


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns the attention window of each layer, in tokens; None for layers without a window."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if not config.get("use_sliding_window", True):
        return (None,) * num_layers
    if window is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise CheckpointError(
                "layer_types in config.json has sliding_attention, but there is no sliding_window"
            )
        return (None,) * num_layers
    window = _size(config, "sliding_window")
    if kinds is None:
        # The key counts the lower layers, which have no window.
        first = config.get("max_window_layers") or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types must name {num_layers} layers, got {len(kinds)}")
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported; supported are {', '.join(known)}"
            )
    return tuple(known[kind] for kind in kinds)


def _rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> rope.Rope:
    """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (older versions)."""
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"rotary embeddings that differ between layers ({', '.join(nested)}) are not supported"
        )
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = _real(given, "rope_theta", _real(config, "rope_theta", 10000.0))
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
            scaling = rope.LinearScaling(_number(given, "factor"))
        case "dynamic":
            scaling = rope.DynamicScaling(_number(given, "factor"), max_positions)
        case "llama3":
            scaling = rope.Llama3Scaling(
                factor=_number(given, "factor"),
                low_freq_factor=_number(given, "low_freq_factor"),
                high_freq_factor=_number(given, "high_freq_factor"),
                original_length=original,
            )
        case "yarn":
            scaling = _yarn(given, original, max_positions)
        case "factors":
            scaling = rope.FactorScaling(_factors(given, head_dim))
        case _:
            raise UnsupportedModelError(
                f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
    return rope.Rope(theta=theta, head_dim=head_dim, scaling=scaling)


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


def _yarn(given: Mapping[str, Any], original: int, max_positions: int) -> rope.YarnScaling:
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
    return rope.YarnScaling(
        factor=float(factor),
        original_length=original,
        attention_factor=float(attention_factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )


def _context_length(scaling: rope.Scaling | None, max_positions: int) -> int:
    """Returns the longest context in tokens, which a scaling may extend past ``max_positions``."""
    match scaling:
        case rope.LinearScaling(factor) | rope.DynamicScaling(factor):
            return int(factor * max_positions)
        case rope.YarnScaling():
            return max(max_positions, int(scaling.factor * scaling.original_length))
        case _:
            return max_positions

"""Reads the parts of config.json that several families share.

`registry.read_spec` reads a whole config.json, and the family decides how. Two other modules know
keys of config.json: `checkpoint.gguf_config` writes them, and `front.generation_defaults` reads the
end tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.config_values import flag, head_dim, optional_strings, real, size
from jaxserve.models.rope_config import context_length, rope, rope_parameters
from jaxserve.models.spec import LayerSpec
from jaxserve.ops.elementwise import ACTIVATIONS

NULL_HAS_A_MEANING = (
    "sliding_window",
    "head_dim",
    "num_key_value_heads",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys for which null does not mean the same as a missing key."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Returns the architecture that a config.json names. Raises CheckpointError."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f'config.json must name one model in "architectures", got {names!r}')
    return names[0]


def settle(
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns a config.json with the values of a family.

    Args:
      config: the contents of the file. Null counts as missing, but for `NULL_HAS_A_MEANING`.
      defaults: values for keys that are missing.
      fixed: values that override the file.

    Raises:
      UnsupportedModelError: the file asks for a variant that no family implements.
    """
    given = {
        key: value
        for key, value in config.items()
        if value is not None or key in NULL_HAS_A_MEANING
    }
    settled = {**defaults, **given, **fixed}
    _check_supported(settled)
    return settled


def shared_fields(
    config: Mapping[str, Any], layers: Sequence[LayerSpec] | None = None
) -> dict[str, Any]:
    """Reads the fields of `ModelSpec` from a settled config.json.

    Args:
      config: the result of `settle`.
      layers: the layers; None reads windows and one rotation for all.

    Raises:
      CheckpointError: a key is missing, or sizes do not fit together.
      UnsupportedModelError: a variant is not implemented.
    """
    num_heads, hidden_size = size(config, "num_attention_heads"), size(config, "hidden_size")
    if layers is None:
        rotation = rope(rope_parameters(config), config)
        layers = [LayerSpec(window, rotation) for window in windows(config)]
    fields = {
        "architecture": architecture_of(config),
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": size(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim(config),
        "norm_eps": real(config, "rms_norm_eps", 1e-6),
        "layers": tuple(layers),
        "tied_head": flag(config, "tie_word_embeddings"),
        "context_length": context_length(
            layers[0].rope.scaling, size(config, "max_position_embeddings")
        ),
    }
    if num_heads % fields["num_kv_heads"]:
        raise CheckpointError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({fields['num_kv_heads']})"
        )
    return fields


def activation(config: Mapping[str, Any], key: str = "hidden_act", default: str = "silu") -> str:
    """Returns the name of the activation in `ACTIVATIONS`. Raises UnsupportedModelError."""
    name = config.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{key} {name!r:.100} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return name


def windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the attention window of each layer, in tokens; None for layers without a window.

    Raises:
      CheckpointError: the keys contradict each other.
      UnsupportedModelError: a layer is of an unknown kind.
    """
    num_layers = size(config, "num_hidden_layers")
    window = config.get("sliding_window")
    kinds = optional_strings(config, "layer_types")
    if not flag(config, "use_sliding_window", default=True):
        return (None,) * num_layers
    if window is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise CheckpointError(
                "layer_types in config.json has sliding_attention, but there is no sliding_window"
            )
        return (None,) * num_layers
    window = size(config, "sliding_window")
    if kinds is None:
        # The key counts the lower layers, which have no window.
        first = size(config, "max_window_layers", 0, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(
            "layer_types in config.json must have an entry for each of the num_hidden_layers "
            f"({num_layers}), got {len(kinds)}"
        )
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported; supported are {', '.join(known)}"
            )
    return tuple(known[kind] for kind in kinds)


def _check_supported(config: Mapping[str, Any]) -> None:
    for key in ("num_local_experts", "num_experts"):
        if config.get(key):
            raise UnsupportedModelError(
                f"mixtures of experts are not supported ({key} is {config[key]}); "
                "only dense models are"
            )
    # An encoder, whose tokens see the tokens after them.
    for key, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if bool(config.get(key, causal)) != causal:
            raise UnsupportedModelError(
                f"attention to later tokens is not supported ({key} is {config[key]!r:.100})"
            )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; only 1.0 is"
        )

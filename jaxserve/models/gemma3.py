"""Gemma 3: Gemma 2 with norms on queries and keys, and two rotations instead of caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.gguf_config import Get, GGUFNames
from jaxserve.checkpoint.mapping import Rule
from jaxserve.errors import CheckpointError
from jaxserve.models.config_values import mapping, size
from jaxserve.models.gemma2 import (
    GGUF_NORMS,
    HF_DEFAULTS,
    Gemma2ForCausalLM,
    Gemma2Spec,
    gemma_fields,
    gguf_query_scalar,
)
from jaxserve.models.hf_config import settle, shared_fields, windows
from jaxserve.models.llama import PREFIX
from jaxserve.models.rope_config import rope, theta
from jaxserve.models.spec import LayerSpec
from jaxserve.ops.rope import Rope


def _gguf_rotations(get: Get) -> dict[str, Any]:
    """Returns the rotations of both kinds of layers; files have only that of full attention."""
    full = {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e6)}
    if get("rope.scaling.type", "none") == "linear":
        full |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)}
    return {"full_attention": full, "sliding_attention": local}


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five of six layers have a window and a rotation of their own."""

    GGUF = GGUFNames(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        layer_tensors=GGUF_NORMS,
        config=lambda get: {
            "query_pre_attn_scalar": gguf_query_scalar(get, layers_of_27b=62),
            "final_logit_softcapping": get("final_logit_softcapping", 0.0) or None,
            "rope_parameters": _gguf_rotations(get),
        },
    )
    RULES = (
        *Gemma2ForCausalLM.RULES,
        Rule(PREFIX + "self_attn.q_norm.weight", "layers.*.attention.q_norm.weight"),
        Rule(PREFIX + "self_attn.k_norm.weight", "layers.*.attention.k_norm.weight"),
    )

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> Gemma2Spec:
        """See `CausalLM.read_spec`.

        ``max_position_embeddings`` is the context after the scaling of the rotation.
        """
        # Scores have no cap: `transformers` has the key, but does not use it in Gemma 3.
        config = settle(config, defaults=HF_DEFAULTS, fixed={"attn_logit_softcapping": None})
        period = size(config, "sliding_window_pattern", 6)
        kinds = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention"
            for i in range(size(config, "num_hidden_layers"))
        ]
        config.setdefault("layer_types", kinds)
        local = _rotation(config, "sliding_attention", "rope_local_base_freq", 1e4)
        full = _rotation(config, "full_attention", "rope_theta", 1e6)
        layers = [LayerSpec(w, full if w is None else local) for w in windows(config)]
        fields = shared_fields(config, layers)
        fields["context_length"] = size(config, "max_position_embeddings")
        return Gemma2Spec(**fields, **gemma_fields(config), qk_norm=True)


def _rotation(config: Mapping[str, Any], kind: str, theta_key: str, default: float) -> Rope:
    """Reads the rotation of one kind of layer, from files of transformers 5 and older ones."""
    nested = mapping(mapping(config, "rope_parameters"), kind)
    old = mapping(config, "rope_scaling") if kind == "full_attention" else {}
    given = {**old, **nested}
    given["rope_theta"] = theta(given, "rope_theta", theta(config, theta_key, default))
    return rope(given, config)


TEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Sizes that ``text_config`` leaves out if they have these values; see `Gemma3TextConfig` of
`transformers`."""


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a Gemma 3 that reads images. Loading skips the image tensors."""

    RULES = tuple(
        replace(rule, name=f"language_model.{rule.name}") for rule in Gemma3ForCausalLM.RULES
    )
    IGNORED = tuple(f"language_model.{name}" for name in Gemma3ForCausalLM.IGNORED)
    COPIES_OF_TIED = tuple(f"language_model.{name}" for name in Gemma3ForCausalLM.COPIES_OF_TIED)

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> Gemma2Spec:
        """See `CausalLM.read_spec`."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json needs an object text_config, got {text!r:.100}")
        known = {"architectures": config["architectures"], **TEXT_DEFAULTS}
        given = {key: value for key, value in text.items() if key != "architectures"}
        return super().read_spec({**known, **given})

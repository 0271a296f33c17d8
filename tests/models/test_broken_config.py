"""A wrong value in config.json works, or is refused by a message that names its key."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import MODELS, read_spec
from jaxserve.ops.rope import cos_sin
from jaxserve.testing.tiny import tiny_config

SETTINGS: dict[str, Any] = {
    **tiny_config(),
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "rope_theta": 1e4,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
    "num_experts": 0,
    "is_causal": True,
    "use_bidirectional_attention": False,
}
"""Every key that some family reads, with a good value."""

WRONG = (5, -1, 0, 0.5, 10**400, True, False, "x", "full_attention", [], [["x"]] * 4, {"a": 1})

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "attention_factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    },
    "factors": {"factors": [1.0] * 8},
}
"""Every parameter of every rope type, with a good value."""

WRONG_NUMBERS = (0, -1, 1e-3, 1e-30, 1e30, math.inf, -math.inf, math.nan, True, "2", [2.0], {})


def works_or_names(key: str, architecture: str, settings: dict[str, Any]) -> bool:
    """Returns whether the config works: asserts finite rotations, or a message with the key."""
    config = {**settings, "architectures": [architecture], "text_config": settings}
    spec, message = None, ""
    try:
        spec = read_spec(config)
    except CheckpointError as error:
        message = str(error)
    if spec is None:
        assert key in message
        assert "cannot be understood" not in message
        return False
    assert spec.context_length >= 1
    for rope in spec.ropes:
        for part in cos_sin(jnp.arange(300), rope):
            assert jnp.isfinite(part).all(), rope
    return True


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_value_of_the_wrong_type_works_or_is_refused_by_name(architecture, key):
    assert works_or_names("nothing", architecture, SETTINGS)
    if key != "architectures":
        for value in WRONG:
            works_or_names(key, architecture, {**SETTINGS, key: value})


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_rotation_of_the_wrong_type_is_refused_by_name(architecture, kind):
    for value in (3, True, "default", [1]):
        settings = {**SETTINGS, "rope_parameters": {kind: value}, "rope_scaling": None}
        assert not works_or_names(kind, architecture, settings)


@pytest.mark.parametrize(
    ("rope_type", "key"), [(kind, key) for kind, given in ROPES.items() for key in given]
)
@pytest.mark.parametrize("nested", [False, True], ids=["llama", "gemma3"])
def test_a_rope_parameter_out_of_range_is_refused_by_name(rope_type, key, nested):
    ignored = {"rope_scaling": None, "original_max_position_embeddings": None}
    architecture = "Gemma3ForCausalLM" if nested else "LlamaForCausalLM"
    results = {}
    for value in (ROPES[rope_type][key], *WRONG_NUMBERS):
        rope = {"rope_type": rope_type, **ROPES[rope_type], key: value}
        given = {"rope_parameters": {"full_attention": rope} if nested else rope}
        settings = {**SETTINGS, **ignored, **given}
        results[repr(value)] = works_or_names(key, architecture, settings)
    assert results[repr(ROPES[rope_type][key])]
    zero_is_missing = key in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    assert results["0"] == zero_is_missing
    assert not any(results[repr(value)] for value in (-1, 1e-30, 1e30, *WRONG_NUMBERS[5:]))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            r"high_freq_factor .*\(4.0\) must be above low_freq_factor \(4.0\)",
        ),
        (
            {"rope_type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2},
            r"beta_fast .*\(1.0\) must be at least beta_slow \(2.0\)",
        ),
        (
            {"rope_type": "linear", "factor": 0},
            "factor in the rope parameters .* number from 1e-06 to 1e.06, got 0",
        ),
        ({"rope_type": "yarn", "factor": 8, "rope_theta": 1}, "rope_theta .* above 1.*got 1$"),
        ({"rope_type": "factors"}, "factors .* list of numbers, got None"),
        (
            {"rope_type": "llama3", **ROPES["llama3"], "original_max_position_embeddings": 1.5},
            "original_max_position_embeddings .* whole number.* got 1.5",
        ),
    ],
)
def test_parameters_of_a_rope_type_must_fit_together(rope, message):
    with pytest.raises(CheckpointError, match=message):
        read_spec(tiny_config(rope_parameters=rope))


def test_dynamic_scaling_needs_more_than_one_pair_of_dimensions():
    rope = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(CheckpointError, match="head_dim above 2, got 2"):
        read_spec(tiny_config(rope_parameters=rope, head_dim=2))


def test_the_original_context_may_be_written_as_a_float():
    rope = {"rope_type": "llama3", **ROPES["llama3"], "original_max_position_embeddings": 64.0}
    (read,) = read_spec(tiny_config(rope_parameters=rope)).ropes
    assert read.scaling.original_length == 64

"""Reading config.json: old and new forms, and configs that are rejected."""

from __future__ import annotations

import math

import pytest

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.registry import MODELS, model_class, read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
)

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def spec(**changes) -> ModelSpec:
    return read_spec(BASE | changes)


def family(name: str, **changes) -> ModelSpec:
    return spec(architectures=[f"{name}ForCausalLM"], **{"num_key_value_heads": 4, **changes})


def test_defaults_of_a_minimal_config():
    minimal = spec()
    assert (minimal.num_kv_heads, minimal.head_dim, minimal.activation) == (4, 16, "silu")
    assert (minimal.norm_eps, minimal.ropes[0].theta, minimal.ropes[0].scaling) == (
        1e-6,
        10000.0,
        None,
    )
    assert minimal.windows == (None,) * 4
    assert minimal.context_length == 2048
    assert {minimal.qkv_bias, minimal.attention_output_bias, minimal.mlp_bias} == {False}
    assert {minimal.qk_norm, minimal.tied_head} == {False}


def test_a_spec_is_hashable():
    assert hash(spec()) == hash(spec())
    assert spec() != spec(vocab_size=7)


def test_null_is_the_same_as_missing():
    keys = (
        *("head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "rope_theta"),
        *("rms_norm_eps", "hidden_act", "partial_rotary_factor", "attention_bias", "mlp_bias"),
        *("tie_word_embeddings", "original_max_position_embeddings"),
    )
    for key in keys:
        assert spec(**{key: None}) == spec(), key
    qwen = family("Qwen2", use_sliding_window=None, max_window_layers=None)
    assert qwen == family("Qwen2")


def test_numbers_may_be_strings():
    assert spec(rms_norm_eps="1e-5").norm_eps == 1e-5
    assert spec(rope_theta="500000").ropes[0].theta == 5e5


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            5e5,
            LinearScaling(2.0),
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, 1e4, LinearScaling(2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7.0}},
            7.0,
            LinearScaling(2.0),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4, DynamicScaling(2.0, 2048)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            1e4,
            Llama3Scaling(8.0, 1.0, 4.0, 512),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            1e4,
            YarnScaling(4.0, 512, 0.1 * math.log(4.0) + 1.0),
        ),
        (
            {"rope_parameters": {"rope_type": "factors", "factors": [1, 1, 2, 2, 2, 2, 4, 4]}},
            1e4,
            FactorScaling((1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0)),
        ),
        (
            {
                "original_max_position_embeddings": 256,
                "rope_scaling": {"type": "yarn", "factor": None, "attention_factor": 1.5},
            },
            1e4,
            YarnScaling(8.0, 256, 1.5),
        ),
    ],
)
def test_reads_rope_in_every_form(changes, theta, scaling):
    (rope,) = spec(**changes).ropes
    assert (rope.theta, rope.head_dim, rope.scaling) == (theta, 16, scaling)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 2048),
    ],
)
def test_context_length_includes_rope_scaling(scaling, context):
    assert spec(rope_scaling=scaling).context_length == context


def test_reads_the_sliding_windows_of_each_family():
    assert family("Llama", sliding_window=8).windows == (None,) * 4
    assert family("Mistral").windows == (4096,) * 4
    assert family("Mistral", sliding_window=8).windows == (8,) * 4
    assert family("Mistral", sliding_window=None).windows == (None,) * 4
    assert family("Mistral", sliding_window=8, use_sliding_window=False).windows == (None,) * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    mixed = family("Mistral", sliding_window=8, layer_types=kinds)
    assert mixed.windows == (None, 8, None, 8)
    qwen = {"sliding_window": 8, "max_window_layers": 3}
    for name in ("Qwen2", "Qwen3"):
        assert family(name, **qwen).windows == (None,) * 4
        upper = family(name, use_sliding_window=True, **qwen)
        assert upper.windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = family("Qwen3", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert mixed.windows == (8, None, 8, None)


def test_reads_the_biases_and_norms_of_each_family():
    qwen2 = family("Qwen2")
    assert (qwen2.qkv_bias, qwen2.attention_output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = family("Qwen3")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = family("Llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads", "head_dim"),
    [
        ("Llama", 4, 4, 16),
        ("Mistral", 8, 8, 8),
        ("Qwen2", 32, 32, 2),
        ("Qwen3", 32, 32, 128),
        ("Gemma2", 4, 4, 256),
        ("Gemma3", 8, 4, 256),
    ],
)
def test_heads_that_a_config_leaves_out_have_the_sizes_of_the_family(
    name, num_heads, num_kv_heads, head_dim
):
    """As the classes of configs in `transformers` have them."""
    read = spec(architectures=[f"{name}ForCausalLM"], num_attention_heads=num_heads)
    assert (read.num_kv_heads, read.head_dim) == (num_kv_heads, head_dim)


def test_gemma_3_caps_no_scores():
    """`transformers` reads the key and does not use it."""
    assert family("Gemma2").attention_soft_cap == 50.0
    assert family("Gemma2", attn_logit_softcapping=9).attention_soft_cap == 9.0
    assert family("Gemma3") == family("Gemma3", attn_logit_softcapping=9.0)
    assert family("Gemma3").attention_soft_cap is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu'.*silu"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'.*yarn"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"is_causal": False}, "later tokens.*is_causal is False"),
        *(
            (
                {"architectures": [f"{name}ForCausalLM"], "use_bidirectional_attention": value},
                f"later tokens.*use_bidirectional_attention is {value!r}",
            )
            for name in ("Gemma2", "Gemma3")
            for value in (True, "all")
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 4,
            },
            "'chunked_attention'.*sliding_attention",
        ),
    ],
)
def test_names_features_that_are_not_implemented(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": "64"}, "hidden_size.*'64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        ({"num_key_value_heads": 3}, r"\(4\).*num_key_value_heads.*\(3\)"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "8 rope factors.*got 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps.*'small'"),
        ({"rope_theta": -1}, "rope_theta.*-1"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": None,
                "layer_types": ["sliding_attention"] * 4,
            },
            "no sliding_window",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types.*4.*1",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings .* true or false, got 'no'"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": True},
            "final_logit_softcapping .* number above 0, got True",
        ),
    ],
)
def test_rejects_invalid_values(changes, message):
    with pytest.raises(CheckpointError, match=message):
        spec(**changes)


@pytest.mark.parametrize("architecture", MODELS)
def test_reads_a_config_and_loads_the_class_of_each_architecture(architecture):
    sizes = BASE | {"num_key_value_heads": 4}
    config = read_spec(sizes | {"architectures": [architecture], "text_config": sizes})
    assert (config.architecture, config.num_layers) == (architecture, 4)
    loaded = model_class(architecture)
    assert issubclass(loaded, CausalLM)
    assert loaded.__name__ == architecture

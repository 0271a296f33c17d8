"""Checkpoints and config.json: the logits of each variant match a reference, or loading fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.folder import INDEX, WEIGHTS
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.config import GIB, CacheConfig, CompileConfig, EngineConfig, ModelConfig
from jaxserve.device import Device
from jaxserve.engine.factory import build
from jaxserve.engine.sizing import resolve_dtype, resolve_sizes
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.front.served_model import ModelFiles
from jaxserve.models.registry import read_spec
from jaxserve.testing.one_step import logits_of
from jaxserve.testing.reference import Reference
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tolerance import assert_close, of_model

ABSENT = object()
SEQUENCE = np.random.default_rng(14).integers(0, 512, 64).tolist()
CPU = Device("cpu", "a CPU", 8 * GIB, has_native_bf16=False)
NEW_CPU = Device("cpu", "a newer CPU", 8 * GIB, has_native_bf16=True)
GPU = Device("gpu", "a GPU", 80 * GIB, has_native_bf16=True)


def write(folder: Path, tensors=None, *, num_shards=1, weights="float32", **changes: Any) -> Path:
    """Writes a checkpoint with ``changes`` to the usual config.json; `ABSENT` removes a key."""
    tensors = random_tensors(tiny_config()) if tensors is None else tensors
    write_checkpoint(folder, tiny_config(dtype=weights), tensors, num_shards=num_shards)
    config = {**tiny_config(dtype=weights), **changes}
    config = {key: value for key, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_logits_match(folder: Path, reference: Reference) -> None:
    assert_close(logits_of(folder, SEQUENCE), reference.logits(SEQUENCE), num_tokens=len(SEQUENCE))


def assert_different(one: Reference, other: Reference) -> None:
    """Asserts that the logits of two references differ enough for a test to tell them apart."""
    logits = one.logits(SEQUENCE)
    tolerance = of_model(tiny_config(), len(SEQUENCE), scale=np.abs(logits).max())
    assert np.abs(logits - other.logits(SEQUENCE)).max() > 100 * tolerance


def frequencies(theta: float = 10000.0, head_dim: int = 16) -> np.ndarray:
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def single_line_message(caught: pytest.ExceptionInfo[Exception]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def run_server(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the server on a checkpoint until it exits."""
    argv = [sys.executable, "-m", "server", str(folder), "--port", "0", "--no-warmup"]
    argv += ["--compilation-cache-dir", "", "--num-blocks", "9", "--dtype", "float32"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("has_head", [True, False])
def test_js_211_a_tied_head_is_the_embedding(tmp_path: Path, has_head: bool) -> None:
    tensors = random_tensors(tiny_config())
    tied = Reference(tensors, tied=True)
    assert_different(tied, Reference(tensors))
    if not has_head:
        tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    assert_logits_match(write(tmp_path / "x", tensors, tie_word_embeddings=True), tied)


def test_js_213_tensors_that_are_not_weights_of_the_model_are_ignored(
    tmp_path: Path, caplog
) -> None:
    tensors = random_tensors(tiny_config())
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert_logits_match(write(tmp_path / "a", tensors | harmless), Reference(tensors))
    assert not caplog.records
    unknown = {"foo.bar": np.ones(3, np.float32), "optimizer.step": np.ones(1, np.float32)}
    assert_logits_match(write(tmp_path / "b", tensors | unknown), Reference(tensors))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "foo.bar" in record.getMessage()
    assert "optimizer.step" in record.getMessage()


def test_js_213_names_of_tensors_may_lack_the_prefix(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_logits_match(write(tmp_path / "x", bare), Reference(tensors))


def test_js_213_an_unknown_tensor_of_a_layer_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.1.mlp.extra_proj.weight"] = np.ones((2, 2), np.float32)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.extra_proj\.weight"):
        logits_of(write(tmp_path / "x", tensors), SEQUENCE)


def test_js_214_a_missing_shard_stops_the_server(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", num_shards=3)
    missing = "model-00002-of-00003.safetensors"
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        open_checkpoint(str(folder))
    result = run_server(folder)
    assert result.returncode == 1
    assert missing in result.stderr
    assert "Traceback" not in result.stderr
    assert "ready" not in result.stderr


def test_js_215_only_files_in_the_index_are_read(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    folder = write(tmp_path / "x", tensors, num_shards=3)
    others = random_tensors(tiny_config(), seed=1)
    save_file(others, folder / "consolidated.safetensors")
    save_file(others, folder / WEIGHTS)
    save_file({"model.norm.weight": np.zeros(64, np.float16)}, folder / "a-run.safetensors")
    assert_logits_match(folder, Reference(tensors))


def stale_index(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    old = {name: file.replace("of-00003", "of-00030") for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": old}))
    return "model-00001-of-00030.safetensors"


def empty_index(folder: Path) -> str:
    (folder / INDEX).write_text("{}")
    return INDEX


def wrong_shard(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    assert "model.norm.weight" not in load_file(folder / "model-00001-of-00003.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    return "model.norm.weight"


def lfs_pointer(folder: Path) -> str:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    (folder / "model-00002-of-00003.safetensors").write_text(text)
    return "git lfs pull"


def truncated_shard(folder: Path) -> str:
    file = folder / "model-00003-of-00003.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    return file.name


@pytest.mark.parametrize(
    "damage", [stale_index, empty_index, wrong_shard, lfs_pointer, truncated_shard]
)
def test_js_216_files_that_do_not_match_the_index_are_refused(tmp_path: Path, damage) -> None:
    folder = write(tmp_path / "x", num_shards=3)
    mentioned = damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    assert mentioned in single_line_message(caught)


def test_js_217_a_missing_weight_stops_the_server(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    missing = "model.layers.1.mlp.up_proj.weight"
    del tensors[missing]
    folder = write(tmp_path / "x", tensors)
    with pytest.raises(CheckpointError) as caught:
        logits_of(folder, SEQUENCE)
    assert missing in single_line_message(caught)
    result = run_server(folder)
    assert result.returncode == 1
    assert missing in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "name", "expected", "actual"),
    [
        ({"vocab_size": 500}, "lm_head.weight", (500, 64), (512, 64)),
        ({"vocab_size": 600}, "lm_head.weight", (600, 64), (512, 64)),
        # The message shows the shape after a matrix has been transposed.
        ({"intermediate_size": 128}, "down_proj.weight", (128, 64), (96, 64)),
        ({"num_key_value_heads": 4}, "k_proj.weight", (64, 64), (64, 32)),
    ],
)
def test_js_218_wrong_shapes_are_refused(tmp_path: Path, changes, name, expected, actual) -> None:
    with pytest.raises(CheckpointError) as caught:
        logits_of(write(tmp_path / "x", **changes), SEQUENCE)
    message = single_line_message(caught)
    assert name in message
    assert str(expected) in message
    assert str(actual) in message


def test_js_218_a_transposed_matrix_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ascontiguousarray(
        tensors["model.layers.0.mlp.up_proj.weight"].T
    )
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        logits_of(write(tmp_path / "x", tensors), SEQUENCE)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_js_218_quantised_tensors_are_refused(tmp_path: Path, dtype) -> None:
    folder = write(tmp_path / "x")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = np.ones(tensors[name].shape, dtype).view(np.int8)
    save_file(tensors, folder / WEIGHTS)
    if dtype == ml_dtypes.float8_e4m3fn:
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + size].replace(b'"I8"', b'"F8_E4M3"')
        (folder / WEIGHTS).write_bytes(
            len(header).to_bytes(8, "little") + header + data[8 + size :]
        )
    with pytest.raises((CheckpointError, UnsupportedModelError), match="not supported") as caught:
        logits_of(folder, SEQUENCE)
    assert name in single_line_message(caught)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_js_218_a_quantised_checkpoint_is_refused_before_its_weights_are_read(
    tmp_path: Path, method: str
) -> None:
    folder = write(tmp_path / "x", quantization_config={"quant_method": method})
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModelError, match=method) as caught:
        open_checkpoint(str(folder))
    assert "not supported" in single_line_message(caught)


@pytest.mark.parametrize("rope_scaling", [None, ABSENT, {}])
@pytest.mark.parametrize("rope_parameters", [None, ABSENT, {}])
def test_js_219_null_absent_and_empty_rope_scaling_mean_no_scaling(
    tmp_path: Path, rope_scaling, rope_parameters
) -> None:
    tensors = random_tensors(tiny_config())
    changes = {"rope_scaling": rope_scaling, "rope_parameters": rope_parameters}
    assert_logits_match(write(tmp_path / "x", tensors, **changes), Reference(tensors))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "kind", [{"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}]
)
@pytest.mark.parametrize("factor", [4, 4.0])
def test_js_220_linear_rope_scaling_divides_the_frequencies(
    tmp_path: Path, key: str, kind: dict, factor: float
) -> None:
    tensors = random_tensors(tiny_config())
    scaled = Reference(tensors, frequencies=frequencies() / 4)
    assert_different(scaled, Reference(tensors))
    changes = {"rope_parameters": ABSENT, key: {**kind, "factor": factor}}
    assert_logits_match(write(tmp_path / "x", tensors, **changes), scaled)


def test_js_221_llama3_rope_scaling_matches_the_reference(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    plain = frequencies()
    wavelengths = 2 * np.pi / plain
    smooth = (32 / wavelengths - 1) / (4 - 1)
    between = (1 - smooth) * plain / 8 + smooth * plain
    scaled = np.where(
        wavelengths > 32 / 1, plain / 8, np.where(wavelengths < 32 / 4, plain, between)
    )
    assert 0 < (scaled == between).sum() < len(scaled)
    reference = Reference(tensors, frequencies=scaled)
    assert_different(reference, Reference(tensors))
    scaling = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    }
    folder = write(tmp_path / "x", tensors, rope_parameters=ABSENT, rope_scaling=scaling)
    assert_logits_match(folder, reference)
    spec = read_spec(open_checkpoint(str(folder)).config)
    sizes = resolve_sizes(
        EngineConfig(), CPU, context_length=spec.context_length, bytes_per_token=512
    )
    assert sizes.max_model_len == 256


THETA = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": THETA}, 500000.0),
        ({"rope_parameters": {"rope_theta": 500000.0}}, 500000.0),
        ({"rope_parameters": THETA, "rope_theta": None}, 500000.0),
        ({"rope_parameters": THETA, "rope_scaling": None}, 500000.0),
        ({"rope_parameters": ABSENT, "rope_theta": 500000.0}, 500000.0),
        ({"rope_parameters": ABSENT, "rope_theta": 500000}, 500000.0),
        ({"rope_parameters": ABSENT}, 10000.0),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0),
    ],
)
def test_js_224_rope_theta_is_read_from_either_place(
    tmp_path: Path, changes: dict, theta: float
) -> None:
    tensors = random_tensors(tiny_config())
    reference = Reference(tensors, frequencies=frequencies(theta))
    other = Reference(tensors, frequencies=frequencies(510000.0 - theta))
    assert_different(reference, other)
    assert_logits_match(write(tmp_path / "x", tensors, **changes), reference)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"head_dim": 16}, {"head_dim": ABSENT}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"head_dim": 8}, {"head_dim": 8}),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": ABSENT}),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": ABSENT, "head_dim": ABSENT}),
    ],
)
def test_js_225_sizes_of_heads_have_defaults(tmp_path: Path, sizes: dict, changes: dict) -> None:
    tensors = random_tensors(tiny_config(**sizes))
    reference = Reference(tensors, head_dim=sizes.get("head_dim", 16))
    assert_logits_match(write(tmp_path / "x", tensors, **changes), reference)


@pytest.mark.parametrize(
    ("sizes", "changes", "eps"),
    [
        ({}, {"head_dim": None}, 1e-5),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": None}, 1e-5),
        ({"num_key_value_heads": 1}, {"num_key_value_heads": 1}, 1e-5),
        ({"attention_bias": True}, {"attention_bias": True}, 1e-5),
        ({"mlp_bias": True}, {"mlp_bias": True}, 1e-5),
        ({}, {"attention_bias": None, "mlp_bias": None}, 1e-5),
        ({}, {"attention_bias": ABSENT, "mlp_bias": ABSENT}, 1e-5),
        ({}, {"rms_norm_eps": "1e-5"}, 1e-5),
        ({}, {"rms_norm_eps": 0.25}, 0.25),
        ({}, {"rms_norm_eps": ABSENT}, 1e-6),
        ({}, {"rms_norm_eps": None}, 1e-6),
        ({}, {"hidden_act": ABSENT}, 1e-5),
        ({}, {"hidden_act": None}, 1e-5),
        ({}, {"tie_word_embeddings": None}, 1e-5),
        ({}, {"tie_word_embeddings": ABSENT}, 1e-5),
        ({}, {"partial_rotary_factor": None, "pretraining_tp": 1}, 1e-5),
        ({}, {"eos_token_id": None, "bos_token_id": None}, 1e-5),
        ({}, {"eos_token_id": ABSENT, "bos_token_id": ABSENT}, 1e-5),
        ({}, {"eos_token_id": [269, 5], "pad_token_id": -1}, 1e-5),
    ],
)
def test_js_226_unusual_but_valid_configs_are_accepted(
    tmp_path: Path, sizes: dict, changes: dict, eps: float
) -> None:
    tensors = random_tensors(tiny_config(**sizes))
    folder = write(tmp_path / "x", tensors, **changes)
    assert_logits_match(folder, Reference(tensors, eps=eps))
    assert ModelFiles.open(ModelConfig(model=str(folder))).name == "x"


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_js_226_biases_must_agree_with_the_config(tmp_path: Path, key: str) -> None:
    has_bias: dict[str, Any] = {key: True}
    biased = random_tensors(tiny_config(**has_bias))
    plain = random_tensors(tiny_config())
    (bias, *_) = sorted(biased.keys() - plain.keys())
    assert_different(Reference(biased), Reference({n: t for n, t in biased.items() if n in plain}))
    with pytest.raises(CheckpointError, match=r"layers\.0.*bias"):
        logits_of(write(tmp_path / "a", biased), SEQUENCE)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers.*bias"):
        logits_of(write(tmp_path / "b", plain, **has_bias), SEQUENCE)
    del biased[bias]
    with pytest.raises(CheckpointError, match=f"lacks {bias}$"):
        logits_of(write(tmp_path / "c", biased, **has_bias), SEQUENCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "tiny"},
        {"rms_norm_eps": -1},
        {"hidden_act": "swishy"},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": "2"},
        {"head_dim": 15},
        {"vocab_size": None},
        {"architectures": None},
    ],
)
def test_js_226_invalid_values_are_refused_with_their_key(tmp_path: Path, changes: dict) -> None:
    folder = write(tmp_path / "x", **changes)
    (key,) = changes
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        logits_of(folder, SEQUENCE)
    assert key in single_line_message(caught)


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("auto", CPU, "float32"),
        ("auto", NEW_CPU, "bfloat16"),
        ("auto", GPU, "bfloat16"),
        *((dtype, GPU, dtype) for dtype in ("float32", "bfloat16", "float16")),
        *((dtype, CPU, dtype) for dtype in ("float32", "bfloat16", "float16")),
    ],
)
def test_js_227_the_dtype_depends_on_the_setting_and_the_device(
    setting, device: Device, expected: str
) -> None:
    """The dtype of the stored weights has no influence."""
    dtype, decision = resolve_dtype(ModelConfig(dtype=setting), device)
    assert dtype == expected
    assert (decision is None) == (setting != "auto")
    assert decision is None or decision.value == expected


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_js_227_weights_are_widened_exactly(tmp_path: Path, weights: str, key) -> None:
    tensors = random_tensors(tiny_config())
    if weights != "float16":
        tensors["model.embed_tokens.weight"][:, :2] = 1e5  # more than float16 can hold
    names = {"dtype": ABSENT, **({key: weights} if key else {})}
    folder = write(tmp_path / "x", tensors, weights=weights, **names)
    stored = {name: tensor.astype(weights) for name, tensor in tensors.items()}
    expected = Reference(stored).logits(SEQUENCE)
    assert np.isfinite(expected).all()
    assert_close(logits_of(folder, SEQUENCE), expected, num_tokens=len(SEQUENCE))


@pytest.mark.parametrize("auto", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", ["auto", "float32", "float16"])
def test_js_227_the_engine_reports_its_dtype_at_the_start(
    random_checkpoint, setting, auto, auto_chooses
) -> None:
    auto_chooses(auto)
    config = EngineConfig(
        ModelConfig(model=str(random_checkpoint), dtype=setting),
        CacheConfig(num_blocks=9),
        compile=CompileConfig(warmup=False, compilation_cache_dir=""),
    )
    built = build(config, 0, lambda progress: None)
    decisions = {name: (value, why) for name, value, why in built.ready.decisions}
    assert decisions["dtype"][0] == (auto if setting == "auto" else setting)
    assert (decisions["dtype"][1] == "as asked") == (setting != "auto")


def test_js_227_float16_logits_match_the_reference(random_checkpoint) -> None:
    expected = Reference(dict(open_checkpoint(str(random_checkpoint)).tensors())).logits(SEQUENCE)
    logits = logits_of(random_checkpoint, SEQUENCE, dtype="float16")
    assert_close(logits, expected, num_tokens=len(SEQUENCE), dtype="float16")

"""Mapping of tensors to parameters: rules, fused parts, and mismatches that are rejected."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.mapping import Rule, Target, assemble, assign, check_names, transpose
from jaxserve.errors import CheckpointError, UnsupportedModelError

RULES = (
    Rule("embed", "embed.weight"),
    Rule("layers.{layer}.{part}.weight", "layers.*.qkv.weight", transpose),
    Rule("layers.{layer}.{part}.bias", "layers.*.qkv.bias"),
)
NUM_LAYERS = 2
PARTS = (("q", 4), ("k", 2))
STACKED = {
    "embed.weight": Target((5, 3), 1),
    "layers.*.qkv.weight": Target((NUM_LAYERS, 3, 6), 1, PARTS, parts_axis=1),
}
SEPARATE = {
    "embed.weight": Target((5, 3), 1),
    "layers.0.qkv.weight": Target((3, 6), 1, PARTS, parts_axis=1),
    "layers.1.qkv.weight": Target((3, 6), 1, PARTS, parts_axis=1),
}
NO_NAMES = frozenset()


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"embed": (5, 3)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"layers.{layer}.q.weight": (4, 3), f"layers.{layer}.k.weight": (2, 3)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def fill(tensors, targets, *, ignored=NO_NAMES) -> dict[str, np.ndarray]:
    destinations = assign(RULES, targets, num_layers=NUM_LAYERS)
    items = tensors.items() if isinstance(tensors, dict) else tensors
    placed = assemble(items, destinations, targets, dtype=np.dtype("float32"), ignored=ignored)
    return {p.target: p.complete for p in placed if p.complete is not None}


def fused(tensors, layer: int) -> np.ndarray:
    pieces = [tensors[f"layers.{layer}.{part}.weight"].T for part in "qk"]
    return np.concatenate(pieces, axis=1).astype(np.float32)


def test_parts_are_fused_and_layers_stacked(tensors):
    result = fill(tensors, STACKED)
    assert set(result) == set(STACKED)
    want = np.stack([fused(tensors, 0), fused(tensors, 1)])
    np.testing.assert_array_equal(result["layers.*.qkv.weight"], want)
    np.testing.assert_array_equal(result["embed.weight"], tensors["embed"].astype(np.float32))


def test_layers_may_be_separate(tensors):
    result = fill(tensors, SEPARATE)
    assert set(result) == set(SEPARATE)
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(result[f"layers.{layer}.qkv.weight"], fused(tensors, layer))


HEADS = (("q", 2), ("k", 1))
BY_HEAD = {
    "embed.weight": Target((5, 3), 1),
    "layers.*.qkv.weight": Target((NUM_LAYERS, 4, 2, 3, 2), 1, HEADS, parts_axis=2),
    "layers.*.qkv.bias": Target((NUM_LAYERS, 2, 3, 2), 0, HEADS, parts_axis=1),
}
"""Four inputs, two key-value heads with two queries and a key each, two values in a head."""


@pytest.fixture
def heads(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Tensors for `BY_HEAD`. The matrices of the keys are square."""
    shapes = {"embed": (5, 3)}
    for layer in range(NUM_LAYERS):
        for part, outputs in (("q", 8), ("k", 4)):
            shapes[f"layers.{layer}.{part}.weight"] = (outputs, 4)
            shapes[f"layers.{layer}.{part}.bias"] = (outputs,)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_the_axes_of_a_matrix_may_be_split_and_parts_lie_along_any_axis(heads):
    result = fill(heads, BY_HEAD)
    for layer in range(NUM_LAYERS):
        for part, where in (("q", slice(0, 2)), ("k", slice(2, 3))):
            weight = result["layers.*.qkv.weight"][layer, :, :, where].reshape(4, -1)
            want = heads[f"layers.{layer}.{part}.weight"].T.astype(np.float32)
            np.testing.assert_array_equal(weight, want)
            bias = result["layers.*.qkv.bias"][layer, :, where].reshape(-1)
            np.testing.assert_array_equal(bias, heads[f"layers.{layer}.{part}.bias"].astype("f4"))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.q.weight", (4, 8), r"\(4, 8\) after transpose, got \(8, 4\)"),
        ("layers.0.q.weight", (8, 2, 2), r"\(4, 8\) after transpose, got \(2, 2, 8\)"),
        ("layers.1.k.bias", (2, 2), r"\(4,\), got \(2, 2\)"),
        ("layers.1.k.bias", (4, 1), r"\(4,\), got \(4, 1\)"),
    ],
)
def test_tensors_must_have_the_shape_of_the_checkpoint_even_if_the_axes_are_split(
    heads, name, shape, expected
):
    heads[name] = np.zeros(shape)
    with pytest.raises(CheckpointError, match=f"{name} must have the shape {expected}"):
        fill(heads, BY_HEAD)


def test_order_of_the_tensors_does_not_matter(tensors):
    backwards = fill(reversed(tensors.items()), STACKED)
    for name, value in fill(tensors, STACKED).items():
        np.testing.assert_array_equal(backwards[name], value)


def test_yields_a_parameter_as_soon_as_it_is_complete(tensors):
    destinations = assign(RULES, SEPARATE, num_layers=NUM_LAYERS)
    steps = assemble(
        tensors.items(), destinations, SEPARATE, dtype=np.dtype("float16"), ignored=NO_NAMES
    )
    progress = [(p.target, p.num_bytes, p.complete is not None) for p in steps]
    assert progress == [
        ("embed.weight", 30, True),
        ("layers.0.qkv.weight", 24, False),
        ("layers.0.qkv.weight", 12, True),
        ("layers.1.qkv.weight", 24, False),
        ("layers.1.qkv.weight", 12, True),
    ]


def test_device_put_does_not_copy_parameters(tensors):
    for value in fill(tensors, STACKED).values():
        assert jax.device_put(value).unsafe_buffer_pointer() == value.ctypes.data


def test_a_wrong_shape_names_the_tensor_and_both_shapes(tensors):
    tensors["layers.1.k.weight"] = np.zeros((3, 3))
    with pytest.raises(CheckpointError, match=r"layers.1.k.weight.*\(3, 2\).*got \(3, 3\)"):
        fill(tensors, STACKED)


def test_rejects_a_shape_that_would_broadcast(tensors):
    tensors["embed"] = np.zeros((1, 3))
    with pytest.raises(CheckpointError, match=r"embed .*\(5, 3\).*got \(1, 3\)"):
        fill(tensors, STACKED)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_rejects_integer_weights(tensors, dtype):
    tensors["embed"] = np.ones((5, 3), dtype)
    with pytest.raises(UnsupportedModelError, match=f"embed is of type {np.dtype(dtype)}"):
        fill(tensors, STACKED)


def test_both_checks_name_a_missing_tensor(tensors):
    del tensors["layers.0.q.weight"]
    with pytest.raises(CheckpointError, match=r"lacks layers.0.q.weight$"):
        fill(tensors, STACKED)
    with pytest.raises(CheckpointError, match=r"lacks layers.0.q.weight$"):
        check_names(list(tensors), assign(RULES, STACKED, num_layers=NUM_LAYERS), ignored=NO_NAMES)


def test_both_checks_name_an_unknown_tensor(tensors):
    """A tensor is unknown even if a rule names it, when the model lacks the parameter."""
    tensors["layers.0.q.bias"] = np.zeros(4)
    with pytest.raises(CheckpointError, match=r"has layers.0.q.bias"):
        fill(tensors, STACKED)
    with pytest.raises(CheckpointError, match=r"has layers.0.q.bias"):
        check_names(list(tensors), assign(RULES, STACKED, num_layers=NUM_LAYERS), ignored=NO_NAMES)


def test_an_unknown_tensor_may_be_ignored(tensors):
    tensors["inv_freq"] = np.zeros(4)
    ignored = frozenset({"inv_freq"})
    assert set(fill(tensors, STACKED, ignored=ignored)) == set(STACKED)
    check_names(list(tensors), assign(RULES, STACKED, num_layers=NUM_LAYERS), ignored=ignored)


def test_both_checks_name_a_duplicate_tensor(tensors):
    twice = [*tensors.items(), ("embed", tensors["embed"])]
    with pytest.raises(CheckpointError, match="embed more than once"):
        fill(twice, STACKED)
    names = [name for name, _ in twice]
    with pytest.raises(CheckpointError, match="embed more than once"):
        check_names(names, assign(RULES, STACKED, num_layers=NUM_LAYERS), ignored=NO_NAMES)


def test_shortens_long_lists_of_names():
    with pytest.raises(CheckpointError, match=r"has a, b, c and 2 more, which"):
        check_names(list("abcde"), {}, ignored=NO_NAMES)


def test_rules_must_not_overlap():
    rules = (*RULES, Rule("embed", "embed.weight"))
    with pytest.raises(AssertionError, match="more than one rule is for embed"):
        assign(rules, STACKED, num_layers=NUM_LAYERS)


def test_rules_must_fill_every_parameter():
    with pytest.raises(AssertionError, match="extra"):
        assign(RULES, STACKED | {"extra": Target((1,))}, num_layers=NUM_LAYERS)

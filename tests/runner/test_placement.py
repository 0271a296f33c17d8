"""Placement: which device has what, on four simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.models.layout import Layout, Loop
from jaxserve.models.loading import abstract_params, array_specs, load_params
from jaxserve.models.registry import read_spec
from jaxserve.ops.linear import MODEL_AXIS, ArraySpec
from jaxserve.runner.kv_cache import abstract, allocate
from jaxserve.runner.placement import (
    ONE_DEVICE,
    WHOLE,
    Placement,
    bytes_on_each_device,
    place,
    specs,
)
from jaxserve.testing.tiny import random_tensors, tiny_config

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


class InMemory:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors
        self.tensor_names = list(tensors)

    def tensors(self):
        yield from self._tensors.items()


def placement_for(config: dict, count: int = 4) -> Placement:
    return place(jax.devices()[:count], array_specs(read_spec(config), Layout("float32", "unroll")))


def test_one_device_changes_nothing():
    assert placement_for(tiny_config(), 1) is ONE_DEVICE
    assert (ONE_DEVICE.num_devices, ONE_DEVICE.sharding(("kv_heads",))) == (1, None)
    assert ONE_DEVICE.on_each_device(abs, in_specs=WHOLE, out_specs=WHOLE) is abs
    arrays = {"a": jnp.zeros(3), "b": jax.ShapeDtypeStruct((2,), "float32")}
    assert specs(arrays) == {"a": WHOLE, "b": WHOLE}


def test_named_axes_are_cut_and_the_others_are_whole():
    placement = placement_for(tiny_config(**HEADS))
    assert placement.num_devices == 4
    found = {
        names: placement.sharding(names).spec  # type: ignore[union-attr]
        for names in [("embed", "mlp"), ("mlp", "embed"), ("vocab", "embed"), ("embed",), ()]
    }
    assert found == {
        ("embed", "mlp"): PartitionSpec(None, MODEL_AXIS),
        ("mlp", "embed"): PartitionSpec(MODEL_AXIS),
        ("vocab", "embed"): PartitionSpec(MODEL_AXIS),
        ("embed",): WHOLE,
        (): WHOLE,
    }


def test_a_vocabulary_that_does_not_divide_stays_whole():
    assert "vocab" in placement_for(tiny_config(**HEADS, vocab_size=512)).cut
    placement = placement_for(tiny_config(**HEADS, vocab_size=514))
    assert set(placement.cut) == {"kv_heads", "mlp"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "must divide the 2 key-value heads of this model, got 4"),
        ({"intermediate_size": 98}, "must divide the 98 columns of the MLP of this model, got 4"),
    ],
)
def test_sizes_that_cannot_be_cut_are_an_error(changes, message):
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {message}"):
        placement_for(tiny_config(**{**HEADS, **changes}))


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_each_device_gets_its_part_of_the_weights(loop: Loop, weights: str):
    config = tiny_config(**HEADS, attention_bias=True, mlp_bias=True)
    tensors, spec, layout = random_tensors(config), read_spec(config), Layout("float32", loop)
    layout = Layout("float32", loop, weights)
    placement = placement_for(config)
    _, whole = load_params(InMemory(tensors), spec, layout)
    _, placed = load_params(InMemory(tensors), spec, layout, sharding=placement.sharding)

    def check(declared: ArraySpec, whole: jax.Array, placed: jax.Array) -> int:
        """Compares every part, and returns the bytes of one."""
        cut = [axis for axis, name in enumerate(declared.names) if name in placement.cut]
        assert len(cut) <= 1
        for i, device in enumerate(jax.devices()):
            (shard,) = (s for s in placed.addressable_shards if s.device == device)
            part = np.split(np.asarray(whole), 4, cut[0])[i] if cut else whole
            np.testing.assert_array_equal(shard.data, part)
        return whole.nbytes // (4 if cut else 1)

    sizes = jax.tree.map(check, array_specs(spec, layout), whole, placed)
    assert bytes_on_each_device(placed) == sum(jax.tree.leaves(sizes))
    assert bytes_on_each_device(whole) == sum(a.nbytes for a in jax.tree.leaves(whole))


@pytest.mark.parametrize(
    ("weights", "whole", "each"),
    [("dense", 16_060_522_496, 4_015_529_984), ("int8", 8_037_058_560, 2_010_450_432)],
)
def test_four_devices_share_the_weights_of_llama_8b(weights: str, whole: int, each: int):
    """Only norms, and the scales of sums, are on every device. docs/performance.md has figures."""
    config = tiny_config(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    spec, layout = read_spec(config), Layout("bfloat16", "scan", weights)
    _, on_one = abstract_params(spec, layout)
    placement = place(jax.devices()[:4], array_specs(spec, layout))
    _, on_four = abstract_params(spec, layout, sharding=placement.sharding)
    assert (bytes_on_each_device(on_one), bytes_on_each_device(on_four)) == (whole, each)


def test_each_device_has_its_heads_of_every_block():
    shape = {"num_layers": 3, "num_kv_heads": 8, "head_dim": 16, "dtype": "float32"}
    placement = placement_for(tiny_config(**HEADS))
    kv = allocate(abstract(**shape, num_blocks=5, block_size=4, placement=placement))
    assert kv.k.shape == kv.v.shape == (3, 5, 4, 8, 16)
    assert [s.data.shape for s in kv.k.addressable_shards] == [(3, 5, 4, 2, 16)] * 4


def test_a_function_runs_on_the_parts_of_each_device():
    placement = placement_for(tiny_config(**HEADS))
    weight = jax.device_put(np.arange(8.0, dtype=np.float32), placement.sharding(("mlp",)))

    def total(weight: jax.Array, x: jax.Array) -> jax.Array:
        assert weight.shape == (2,)
        return jax.lax.psum(weight.sum() * x, MODEL_AXIS)

    run = placement.on_each_device(total, in_specs=(specs(weight), WHOLE), out_specs=WHOLE)
    found = jax.jit(run)(weight, np.float32(3))
    assert (float(found), found.sharding.is_fully_replicated) == (84.0, True)

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.attention import AttentionMeta
from jaxserve.runner.packing import pack


def test_what_is_unpacked_on_the_device_is_what_was_packed():
    rng = np.random.default_rng(0)
    tree = {
        "floats": rng.normal(size=(3, 5)).astype(np.float32),
        "unsigned": rng.integers(0, 2**32, (2, 2), np.uint32),
        "empty": np.zeros((0, 4), np.int32),
        "none": None,
        "meta": AttentionMeta(
            *(rng.integers(-9, 9, shape).astype(np.int32) for shape in [4, 4, (2, 3), 2, 3]),
            decode_only=True,
        ),
    }
    out = jax.jit(lambda packed: packed.unpack())(pack(tree))
    assert out["meta"].decode_only
    for found, given in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert found.dtype == given.dtype
        np.testing.assert_array_equal(found, given)


def test_equal_shapes_share_a_program():
    calls = []

    @jax.jit
    def total(packed):
        calls.append(1)
        return jnp.sum(packed.unpack())

    assert int(total(pack(np.arange(4, dtype=np.int32)))) == 6
    assert int(total(pack(np.arange(4, dtype=np.int32) + 1))) == 10
    assert len(calls) == 1


def test_later_changes_of_the_arrays_do_not_reach_the_buffer():
    array = np.arange(3, dtype=np.int32)
    packed = pack(array)
    array[:] = 9
    np.testing.assert_array_equal(packed.buffer, [0, 1, 2])

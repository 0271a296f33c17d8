"""Packed arrays, and the count and the log of compiled programs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.attention import AttentionMeta
from jaxserve.runner import compilation_cache, jit
from jaxserve.runner.jit import pack


def test_unpack_returns_the_packed_arrays():
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


def test_pack_copies_the_arrays():
    array = np.arange(3, dtype=np.int32)
    packed = pack(array)
    array[:] = 9
    np.testing.assert_array_equal(packed.buffer, [0, 1, 2])


def test_jax_still_counts_the_programs_of_a_jitted_function():
    """If this fails with a new version of jax, `jit.num_programs` needs another way to count."""
    jitted = jax.jit(lambda x, *, k: x[:k], static_argnames="k")
    assert hasattr(jitted, "_cache_size"), "jax.jit lost the private method _cache_size"
    counts = [jit.num_programs(jitted)]
    for width, k in [(4, 1), (4, 1), (4, 2), (5, 1), (5, 1)]:
        jitted(np.zeros(width, np.float32), k=k)
        counts.append(jit.num_programs(jitted))
    assert counts == [0, 1, 1, 2, 3, 3], "_cache_size no longer counts compiled programs"


def test_two_modules_use_private_interfaces_of_jax():
    package = Path(jit.__file__).parents[1]
    private = re.compile(r"\bjax\._src|_cache_size")
    using = {str(p) for p in package.rglob("*.py") if private.search(p.read_text())}
    assert using == {jit.__file__, compilation_cache.__file__}


def test_logs_each_compilation_once_and_warns_of_unexpected_compilations(caplog):
    log = jit.CompilationLog()
    program = jit.Program("doubling", jax.jit(lambda x: 2 * x), log)
    with log.expected():
        program(np.zeros(3), shapes="3")
    program(np.zeros(3), shapes="3")
    assert not caplog.records
    program(np.zeros(4), shapes="4")
    assert log.programs == ["doubling: 3", "doubling: 4"]
    (record,) = caplog.records
    assert "doubling: 4" in record.getMessage()

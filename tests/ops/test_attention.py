"""Every attention backend, compared with float64 numpy on caches with NaN in unused slots."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import Device
from jaxserve.ops.attention import BACKENDS, AttentionMeta, KVCache, load
from jaxserve.testing.tolerance import rounding, unit

CONTEXTS = (0, 1, 15, 16, 17, 31, 33, 200)
LARGEST = 5.0  # the largest of a hundred thousand standard normal numbers
NUM_LAYERS = 2
LAYER = 1
CPU = Device(platform="cpu", kind="some CPU", free_bytes=0, has_native_bf16=False)


@dataclass(frozen=True)
class Case:
    """One step: request r has ``seq_lens[r]`` tokens, the last ``query_lens[r]`` of them new."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    pad_tokens: int = 0
    pad_rows: int = 0
    decode_only: bool = False


@dataclass(frozen=True)
class Step:
    """The arrays of a case. ``keys[r]`` and ``values[r]``: float32[seq_len, K, D]."""

    q: np.ndarray
    new_k: np.ndarray
    new_v: np.ndarray
    kv: KVCache
    meta: AttentionMeta
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make(case: Case, rng: np.random.Generator, dtype=np.float32) -> Step:
    """Returns shuffled blocks, NaN in unused slots, and invalid IDs in unused table entries."""
    size, lens, queries = case.block_size, case.seq_lens, case.query_lens
    num_rows = len(lens) + case.pad_rows
    num_tokens = sum(queries) + case.pad_tokens
    used = [-(-n // size) for n in lens]
    num_blocks = sum(used) + 3
    width = max([*used, 1]) + 1
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = rng.choice([-7, 0, num_blocks, 10**6], size=(num_rows, width)).astype(np.int32)
    head = (case.num_kv_heads, case.head_dim)
    cache = np.full((2, NUM_LAYERS, num_blocks, size, *head), np.nan, dtype)
    keys = [rng.standard_normal((n, *head)).astype(dtype) for n in lens]
    values = [rng.standard_normal((n, *head)).astype(dtype) for n in lens]
    positions, slots, new_k, new_v = [], [], [], []
    for row, (n, new) in enumerate(zip(lens, queries, strict=True)):
        for i in range(used[row]):
            tables[row, i] = free.pop()
        at = np.arange(n)
        slot = tables[row, at // size] * size + at % size
        old = slot[: n - new]
        cache[0, LAYER].reshape(-1, *head)[old] = keys[row][: n - new]
        cache[1, LAYER].reshape(-1, *head)[old] = values[row][: n - new]
        positions += list(at[n - new :])
        slots += list(slot[n - new :])
        new_k += list(keys[row][n - new :])
        new_v += list(values[row][n - new :])
    num_heads = case.num_kv_heads * case.group
    nan = np.full((case.pad_tokens, *head), np.nan, dtype)
    ends = np.cumsum([0, *queries])
    meta = AttentionMeta(
        positions=padded(positions, num_tokens, 0),
        slots=padded(slots, num_tokens, num_blocks * size),
        block_tables=jnp.asarray(tables),
        seq_lens=padded(lens, num_rows, 0),
        query_start=padded(ends, num_rows + 1, ends[-1]),
        decode_only=case.decode_only,
    )
    q = rng.standard_normal((num_tokens, num_heads, case.head_dim)).astype(dtype)
    q[sum(queries) :] = np.nan
    k = np.concatenate((np.reshape(new_k, (-1, *head)).astype(dtype), nan))
    v = np.concatenate((np.reshape(new_v, (-1, *head)).astype(dtype), nan))
    kv = KVCache(jnp.asarray(cache[0]), jnp.asarray(cache[1]))
    return Step(q, k, v, kv, meta, keys, values)


def padded(values, length: int, fill: int) -> jax.Array:
    return jnp.asarray([*values, *[fill] * (length - len(values))], jnp.int32)


def expected(case: Case, step: Step, scale: float) -> np.ndarray:
    """Returns float64[tokens without padding, heads, head_dim], computed query by query."""
    out, token = [], 0
    for row, (n, new) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        for position in range(n - new, n):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            k = step.keys[row][first : position + 1].astype(np.float64)
            v = step.values[row][first : position + 1].astype(np.float64)
            for head in range(case.num_kv_heads * case.group):
                scores = k[:, head // case.group] @ step.q[token, head].astype(np.float64) * scale
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max())
                out.append(weights @ v[:, head // case.group] / weights.sum())
            token += 1
    return np.reshape(out, (-1, case.num_kv_heads * case.group, case.head_dim))


def run(backend_name: str, case: Case, step: Step, scale: float) -> np.ndarray:
    backend = load(backend_name, CPU)

    @functools.partial(jax.jit, static_argnames="scale")
    def write_and_attend(q, k, v, kv, meta, layer, scale):
        kv = backend.write(kv, layer, k, v, meta)
        options = {"window": case.window, "soft_cap": case.soft_cap}
        return backend.attend(q, kv, layer, meta, scale=scale, **options)

    out = write_and_attend(step.q, step.new_k, step.new_v, step.kv, step.meta, LAYER, scale)
    return np.asarray(out, np.float64)


def tolerance(case: Case) -> float:
    """Returns the largest error allowed for attention with float32 sums.

    Queries, keys and values are standard normal, and so are scores at a scale of
    ``head_dim ** -0.5``. An error of a score is a relative error of a weight; the output is a mean
    of the values by these weights.
    """
    return rounding("float32", case.head_dim, scale=LARGEST) + rounding(
        "float32", max(case.seq_lens), scale=LARGEST
    )


# The output is rounded to bfloat16; before that, the scaled query and the weights may be.
BFLOAT16 = {"rtol": unit(jnp.bfloat16), "atol": rounding(jnp.bfloat16, 2)}


def decode(**changes) -> Case:
    lens = changes.pop("seq_lens", CONTEXTS[1:])
    return Case(lens, (1,) * len(lens), decode_only=True, **changes)


CASES = {
    "decode": decode(),
    "decode-padded": decode(pad_tokens=3, pad_rows=3),
    "decode-one-row": decode(seq_lens=(77,), pad_tokens=1, pad_rows=1),
    "decode-many-rows": decode(seq_lens=tuple(1 + n % 90 for n in range(256))),
    "decode-rows-of-no-tile": decode(seq_lens=(40, 3, 17, 200, 9, 64, 65, 1, 33, 7, 16)),
    "decode-long": decode(seq_lens=(1500, 3), head_dim=32),
    "decode-mqa": decode(num_kv_heads=1, group=20, head_dim=32),
    "decode-many-kv-heads": decode(num_kv_heads=8, group=4, head_dim=16),
    "decode-window": decode(window=20),
    "decode-window-1": decode(window=1),
    "decode-window-soft-cap": decode(window=33, soft_cap=2.0),
    "decode-small-blocks": decode(block_size=4),
    "decode-large-blocks": decode(block_size=128),
    "prefill": Case(CONTEXTS, CONTEXTS, pad_tokens=7, pad_rows=2),
    "prefill-long": Case((300, 5), (300, 5), window=None),
    "mixed": Case((31, 200, 16, 90, 17, 33), (1, 1, 1, 1, 17, 20), pad_tokens=5, pad_rows=3),
    "mixed-empty-middle": Case((16, 0, 33, 0, 200), (1, 0, 16, 0, 70), pad_rows=1),
    "mixed-decode": Case((31, 200, 16), (1, 1, 1), pad_tokens=1, pad_rows=9),
    "mixed-window": Case((31, 200, 16, 90, 33), (1, 1, 1, 40, 33), window=18, pad_tokens=3),
    "mixed-soft-cap": Case((31, 200, 16, 90), (1, 1, 7, 40), soft_cap=2.0, pad_rows=1),
    "mixed-mqa": Case((31, 64, 90), (1, 33, 40), num_kv_heads=1, group=20, head_dim=32),
    "chunk": Case((200, 129, 64), (64, 64, 64)),
    "chunk-large-blocks": Case((300, 31), (90, 31), block_size=128, pad_tokens=8),
}
FOR_KERNELS = ("decode-padded", "mixed", "decode-window-soft-cap", "mixed-window")


def on_backends(names: Iterable[str]) -> pytest.MarkDecorator:
    """Runs a test with each backend and case.

    On a CPU the kernels are interpreted, which is slow, and they have their own tests. Here they
    run only the cases that show that the arguments reach them.
    """
    runs = [(b, n) for b in BACKENDS for n in names if b != "pallas_triton" or n in FOR_KERNELS]
    return pytest.mark.parametrize(("backend", "name"), runs)


@on_backends(CASES)
def test_equals_float64_reference(backend: str, name: str, rng: np.random.Generator):
    case = CASES[name]
    step = make(case, rng)
    scale = case.head_dim**-0.5
    got = run(backend, case, step, scale)
    want = expected(case, step, scale)
    assert got.shape == step.q.shape
    np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=tolerance(case))


@on_backends(["decode-padded", "mixed"])
def test_bfloat16_is_close(backend: str, name: str, rng: np.random.Generator):
    case = CASES[name]
    step = make(case, rng, jnp.bfloat16)
    scale = case.head_dim**-0.5
    got = run(backend, case, step, scale)
    want = expected(case, step, scale)
    np.testing.assert_allclose(got[: len(want)], want, **BFLOAT16)


@on_backends(["decode-padded", "mixed"])
def test_cache_may_be_wider_than_the_activations(backend, name, rng):
    case = CASES[name]
    step = make(case, rng, jnp.bfloat16)
    wide = KVCache(step.kv.k.astype(jnp.float32), step.kv.v.astype(jnp.float32))
    scale = case.head_dim**-0.5
    got = run(backend, case, replace(step, kv=wide), scale)
    want = expected(case, step, scale)
    np.testing.assert_allclose(got[: len(want)], want, **BFLOAT16)


@on_backends(["decode-padded", "mixed"])
def test_padding_stays_finite_with_finite_queries(backend: str, name: str, rng):
    """Padding runs through the rest of the model, where nothing may overflow or trap."""
    case = CASES[name]
    step = make(case, rng)
    step = replace(step, q=np.nan_to_num(step.q, nan=1.0))
    assert np.isfinite(run(backend, case, step, 0.1)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str, rng: np.random.Generator):
    case = CASES["mixed"]
    step = make(case, rng)
    got = run(backend, case, step, 1e4)
    want = expected(case, step, 1e4)
    # The scores are thousands apart, so a weight is 0 or 1 and their own errors do not count.
    atol = rounding("float32", max(case.seq_lens), scale=LARGEST)
    np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_changes_only_its_own_slots(backend: str, rng: np.random.Generator):
    case = CASES["mixed"]
    step = make(case, rng)
    before = np.nan_to_num(np.stack([step.kv.k, step.kv.v]), nan=-1.0)
    kv = KVCache(jnp.asarray(before[0]), jnp.asarray(before[1]))
    written = jax.jit(load(backend, CPU).write)(kv, LAYER, step.new_k, step.new_v, step.meta)
    for after, want, new in (
        (written.k, before[0], step.new_k),
        (written.v, before[1], step.new_v),
    ):
        want = want.copy()
        real = sum(case.query_lens)
        slots = np.asarray(step.meta.slots[:real])
        want[LAYER].reshape(-1, *new.shape[1:])[slots] = new[:real]
        np.testing.assert_array_equal(np.asarray(after), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_is_in_place_when_donated(backend: str, rng: np.random.Generator):
    step = make(CASES["decode"], rng)
    write = jax.jit(load(backend, CPU).write, donate_argnums=0)
    memory = write.lower(step.kv, LAYER, step.new_k, step.new_v, step.meta).compile()
    analysis = memory.memory_analysis()
    cache_bytes = step.kv.k.nbytes + step.kv.v.nbytes
    assert analysis.alias_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 2

"""The kernel calls that `aot_check.py` compiles: shapes of real models, and every option once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quantization import has_scales
from pallas_kernels.ragged_attention import ragged_attention

NUM_LAYERS = 32
NUM_BLOCKS = 12288
WIDTH = 512
LAYER = jax.ShapeDtypeStruct((), jnp.int32)

Args: TypeAlias = tuple[jax.ShapeDtypeStruct | None, ...]


@dataclass(frozen=True)
class Case:
    """A call, the kernels that it must contain, and the indices of its donated arguments."""

    name: str
    fn: Callable[..., Any]
    args: Args
    kernels: tuple[str, ...]
    donated: tuple[int, ...] = ()

    @property
    def donated_bytes(self) -> int:
        """Size of the donated arguments in bytes."""
        arrays = filter(None, (self.args[i] for i in self.donated))
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model, and the layout of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    cache_dtype: Any = None
    options: tuple[tuple[str, Any], ...] = ()


MODELS = {
    "smollm2-135m 9/3x64": Heads(9, 3, 64),
    "llama-8b 32/8x128": Heads(32, 8, 128),
    "qwen2.5-7b 28/4x128": Heads(28, 4, 128, block_size=32),
    "qwen3-32b 64/8x128 f16": Heads(64, 8, 128, dtype=jnp.float16, block_size=64),
    "gemma3-12b 16/8x256": Heads(16, 8, 256, options=(("window", 1024), ("soft_cap", 50.0))),
    "phi3-mini 32/32x96": Heads(32, 32, 96, options=(("window", 2047),)),
    "phi2 32/32x80": Heads(32, 32, 80),
    "falcon-7b 71/1x64": Heads(71, 1, 64),
    "starcoder 48/1x128": Heads(48, 1, 128),
    "llama-8b fp8": Heads(32, 8, 128, cache_dtype=jnp.float8_e4m3fn),
    "llama-8b int8": Heads(32, 8, 128, cache_dtype=jnp.int8),
    "llama-8b f16 int8": Heads(32, 8, 128, dtype=jnp.float16, cache_dtype=jnp.int8),
    "gemma3-12b int8": Heads(16, 8, 256, cache_dtype=jnp.int8),
    "smollm2-135m int8": Heads(9, 3, 64, cache_dtype=jnp.int8),
    "llama-8b f32": Heads(32, 8, 128, dtype=jnp.float32),
    "llama-8b f32 cache": Heads(32, 8, 128, cache_dtype=jnp.float32),
    "gemma3-12b f32": Heads(16, 8, 256, dtype=jnp.float32),
    "tiny 4/2x32": Heads(4, 2, 32),
    "tiny 4/2x16": Heads(4, 2, 16),
}


def cases() -> Iterator[Case]:
    """Yields every call to compile."""
    for name, heads in MODELS.items():
        yield _decode(f"decode {name}", heads, num_rows=8)
        yield _ragged(f"ragged {name}", heads, num_tokens=2048, num_rows=32)
        yield _write(f"write {name}", heads, num_tokens=2048)
    yield _decode("decode llama-8b 256 rows", MODELS["llama-8b 32/8x128"], num_rows=256)


def _decode(name: str, heads: Heads, *, num_rows: int) -> Case:
    q = jax.ShapeDtypeStruct((num_rows, heads.num_heads, heads.head_dim), heads.dtype)
    split = num_rows * heads.num_kv_heads < 128
    kernels = ("paged_decode", "paged_decode_merge") if split else ("paged_decode",)
    return _attention(name, heads, paged_decode, (q, *_cache(heads), *_tables(num_rows)), kernels)


def _ragged(name: str, heads: Heads, *, num_tokens: int, num_rows: int) -> Case:
    q = jax.ShapeDtypeStruct((num_tokens, heads.num_heads, heads.head_dim), heads.dtype)
    query_start = jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32)
    args = (q, *_cache(heads), *_tables(num_rows), query_start)
    return _attention(name, heads, ragged_attention, args, ("ragged_attention",))


def _attention(
    name: str, heads: Heads, attention: Callable[..., Any], args: Args, kernels: tuple[str, ...]
) -> Case:
    """Returns a call of an attention kernel on ``args``, the layer and the scales."""

    def fn(*args: Any) -> jax.Array:
        *data, k_scale, v_scale = args
        return attention(*data, scale=0.1, k_scale=k_scale, v_scale=v_scale, **dict(heads.options))

    return Case(name, fn, (*args, LAYER, *_scales(heads)), kernels)


def _write(name: str, heads: Heads, *, num_tokens: int) -> Case:
    k = jax.ShapeDtypeStruct((num_tokens, heads.num_kv_heads, heads.head_dim), heads.dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def fn(*args: Any) -> tuple[jax.Array | None, ...]:
        *data, k_scale, v_scale = args
        return kv_write(*data, k_scale=k_scale, v_scale=v_scale)

    args = (*_cache(heads), k, k, slots, LAYER, *_scales(heads))
    return Case(name, fn, args, ("kv_write",), donated=(0, 1, 6, 7))


def _cache(heads: Heads) -> Args:
    """Returns the keys and the values."""
    shape = (NUM_LAYERS, NUM_BLOCKS, heads.block_size, heads.num_kv_heads, heads.head_dim)
    return (jax.ShapeDtypeStruct(shape, heads.cache_dtype or heads.dtype),) * 2


def _scales(heads: Heads) -> Args:
    """Returns the scales of the cache, which are None unless it is int8."""
    if not has_scales(heads.cache_dtype or heads.dtype):
        return (None, None)
    shape = (NUM_LAYERS, NUM_BLOCKS, heads.block_size, heads.num_kv_heads)
    return (jax.ShapeDtypeStruct(shape, jnp.float32),) * 2


def _tables(num_rows: int) -> Args:
    """Returns the block tables and the lengths."""
    tables = jax.ShapeDtypeStruct((num_rows, WIDTH), jnp.int32)
    return tables, jax.ShapeDtypeStruct((num_rows,), jnp.int32)

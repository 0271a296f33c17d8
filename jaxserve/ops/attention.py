"""The seam between a model and the kernels that read and write its KV cache.

A backend is two pure functions, `write` and `attend`, chosen once by `select` and closed over by
the step. To add one: write the two functions and add a line to `BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax

from jaxserve.config import Device
from jaxserve.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of every block of every layer.

    Attributes:
      k: ``[num_layers, num_blocks, block_size, num_kv_heads, head_dim]``; block 0 is never handed
        out, so that padding can point at it. Slots that hold no live token hold garbage, which may
        be NaN.
      v: the same shape and dtype.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMeta:
    """Which token of the packed super-sequence belongs to which request, and where its cache is.

    T is the padded number of tokens, R of requests, W the padded width of the block tables. Real
    entries come first everywhere; padding is harmless by construction. Each request's tokens are
    contiguous, in order of position; requests with one token (decode) come first.

    Attributes:
      positions: i32[T], position of each token in its own request, in [0, max_model_len);
        padding 0.
      slots: i32[T], where each token's key and value go: ``block * block_size + position %
        block_size``. Padding is ``num_blocks * block_size``, which is out of range and dropped.
      block_tables: i32[R, W], the blocks of each request in order, in [0, num_blocks). Unused
        entries may hold anything.
      seq_lens: i32[R], tokens of each request in the cache once this step has written: the
        position of its last token in the step, plus 1. Padding 0.
      query_start: i32[R + 1], non-decreasing: tokens ``query_start[r] : query_start[r + 1]`` belong
        to request r. Padding repeats the number of real tokens.
      decode_only: static. Every request has exactly one token, token r is that of request r, and
        T == R. Padding rows have ``seq_lens`` 0.
    """

    positions: jax.Array
    slots: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start: jax.Array
    decode_only: bool = field(metadata={"static": True}, default=False)


class WriteFn(Protocol):
    """Writes the step's new keys and values into the cache, in place when it is donated."""

    def __call__(
        self, kv: KVCache, layer: jax.Array | int, k: jax.Array, v: jax.Array, meta: AttentionMeta
    ) -> KVCache:
        """``k`` and ``v`` are [T, num_kv_heads, head_dim], one row a token of the step; ``layer``
        is in [0, num_layers)."""
        ...


class AttendFn(Protocol):
    """Causal attention of the step's queries over what the cache holds, this step included."""

    def __call__(
        self,
        q: jax.Array,
        kv: KVCache,
        layer: jax.Array | int,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """``q`` is [T, num_heads, head_dim] in any float dtype; so is the result, in q's dtype.

        The query at position p of its request sees positions max(0, p - window + 1) .. p (from 0
        without a window). Scores are ``q . k * scale``, then ``soft_cap * tanh(s / soft_cap)`` if
        given, softmax in float32. Rows of padding tokens hold anything finite.
        """
        ...


class AttentionBackend(NamedTuple):
    """How one kind of device reads and writes the cache."""

    name: str
    write: WriteFn
    attend: AttendFn


# Name -> module with the functions `write` and `attend`, imported when it is chosen.
BACKENDS: dict[str, str] = {
    "xla": "jaxserve.ops.xla_attention",
}


def load(name: str) -> AttentionBackend:
    """The backend of that name, a key of `BACKENDS`."""
    module = importlib.import_module(BACKENDS[name])
    return AttentionBackend(name, write=module.write, attend=module.attend)


def select(name: str, device: Device) -> tuple[AttentionBackend, str]:
    """The backend to use on a device, and why.

    Args:
      name: a key of `BACKENDS`, or auto.

    Raises:
      ConfigError: there is no backend of that name.
    """
    if name == "auto":
        return load("xla"), f"runs on any device, {device.kind} too"
    if name not in BACKENDS:
        raise ConfigError(
            f"there is no attention backend {name!r}; choose auto or one of {', '.join(BACKENDS)}"
        )
    return load(name), "as asked"

"""The seam between a model and the kernels that read and write its KV cache.

A backend is two pure functions, `write` and `attend`, chosen once by `select` and closed over by
the step. To add one: write the two functions and add a line to `BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Float, Int32

from jaxserve.arrays import Leaf
from jaxserve.device import Device
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

    k: Float[Leaf, "layers blocks block_size kv_heads head_dim"]
    v: Float[Leaf, "layers blocks block_size kv_heads head_dim"]


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

    positions: Int32[Leaf, " tokens"]
    slots: Int32[Leaf, " tokens"]
    block_tables: Int32[Leaf, "rows width"]
    seq_lens: Int32[Leaf, " rows"]
    query_start: Int32[Leaf, " rows+1"]
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


@dataclass(frozen=True)
class AttentionShape:
    """What a backend is asked to serve; dtypes as numpy names them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    cache_dtype: str


class CheckFn(Protocol):
    """Says no before anything is loaded."""

    def __call__(self, shape: AttentionShape) -> None:
        """Raises ConfigError, saying why, for what the backend cannot serve on its device."""
        ...


def serves_everything(shape: AttentionShape) -> None:
    """The `CheckFn` of a backend without limits."""
    del shape


class AttentionBackend(NamedTuple):
    """How one kind of device reads and writes the cache.

    ``remark`` is what a user should know about how it runs on this device, or empty.
    """

    name: str
    write: WriteFn
    attend: AttendFn
    check: CheckFn = serves_everything
    remark: str = ""


# Name -> module with a function `backend(device) -> AttentionBackend`, imported when it is chosen.
BACKENDS: dict[str, str] = {
    "xla": "jaxserve.ops.xla_attention",
    "pallas_triton": "jaxserve.ops.pallas_attention",
}


def load(name: str, device: Device) -> AttentionBackend:
    """The backend of that name, a key of `BACKENDS`, for a device."""
    return importlib.import_module(BACKENDS[name]).backend(device)


def select(name: str, device: Device, shape: AttentionShape) -> tuple[AttentionBackend, str]:
    """The backend to use on a device, and why.

    Args:
      name: a key of `BACKENDS`, or auto: the kernels on a GPU that they can serve, else xla.
      device: what the step runs on.
      shape: what the backend has to serve.

    Raises:
      ConfigError: there is no backend of that name, or it cannot serve the shape on the device.
    """
    if name == "auto":
        return _select_auto(device, shape)
    if name not in BACKENDS:
        raise ConfigError(
            f"there is no attention backend {name!r}; choose auto or one of {', '.join(BACKENDS)}"
        )
    backend = load(name, device)
    backend.check(shape)
    return backend, ", ".join(filter(None, ("as asked", backend.remark)))


def _select_auto(device: Device, shape: AttentionShape) -> tuple[AttentionBackend, str]:
    if device.platform == "cpu":
        return load("xla", device), f"runs on any device, {device.kind} too"
    kernels = load("pallas_triton", device)
    try:
        kernels.check(shape)
    except ConfigError as error:
        return load("xla", device), str(error)
    return kernels, f"kernels for {device.kind}"

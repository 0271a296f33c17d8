"""The interface between a model and the kernels that read and write its KV cache.

A backend is two pure functions, `write` and `attend`. `select` chooses a backend once, and the
compiled step closes over it. To add a backend, write the two functions and add a line to
`BACKENDS`.

Dimensions: T tokens of a step, R rows of its block tables, W width of the tables, G groups of
layers, L layers of the cache, B blocks, S block_size, N query heads, K key-value heads, H head_dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from jaxserve.arrays import Leaf
from jaxserve.device import Device
from jaxserve.errors import ConfigError
from pallas_kernels.limits import is_quantized

LayerIndex = Int32[Array, ""] | int
"""The index of a layer in the cache, in [0, L): an array inside a loop over the layers."""

Window = Int32[Array, ""] | int | None
"""A query sees the latest ``window`` positions, its own included; None: all."""

NO_WINDOW = 2**30
"""A window that no context exceeds, for a loop over layers of which only some have a window."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of every block.

    A block belongs to one group of layers at a time, and L is the most layers of a group; see
    `models.cache_layout`.

    Attributes:
      k: [L, B, S, K, H], in a dtype of `pallas_kernels.limits.CACHE_DTYPES`, except that float8
        entries are held as their bits, in uint8: on a CPU, XLA rewrites an array of float8 to write
        to it. Block 0 is never allocated, so that padding can point to it. Slots without a live
        token hold garbage, which may be NaN.
      v: the same shape and dtype.
      k_scale: f32[L, B, S, K], the factors of the keys of a cache of int8; None for any other
        dtype. Slots without a live token hold garbage here too.
      v_scale: the same for the values.
    """

    k: Num[Leaf, "layers blocks block_size kv_heads head_dim"]
    v: Num[Leaf, "layers blocks block_size kv_heads head_dim"]
    k_scale: Float32[Leaf, "layers blocks block_size kv_heads"] | None = None
    v_scale: Float32[Leaf, "layers blocks block_size kv_heads"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMeta:
    """Maps each token of a step to its request, and to its slot in one group of the cache.

    The tokens of all requests form one sequence. The tokens of a request are contiguous, in order
    of position, and requests with one token (decode) precede the others. T, R and W are padded
    sizes: real entries precede padding in every array. Backends must not read or write live data
    through padding.

    Attributes:
      positions: i32[T], the position of each token in its own request, in [0, max_model_len);
        padding is 0.
      slots: i32[T], the slot that each token's key and value are written to: ``block * block_size
        + position % block_size``. Padding is ``num_blocks * block_size``, which is out of range, so
        the write is dropped.
      block_tables: i32[R, W], the blocks of each request in order, in [0, num_blocks). Unused
        entries may hold any number. Entries of blocks that no window reaches any more are 0.
      seq_lens: i32[R], the tokens of each request in the cache after this step's write: the
        position of its last token in the step, plus 1. Padding is 0.
      query_start: i32[R + 1], non-decreasing: tokens ``query_start[r] : query_start[r + 1]`` belong
        to request r. Padding repeats the number of real tokens.
      decode_only: static. If true, every request has exactly one token, token r belongs to request
        r, and T == R. Padding rows have ``seq_lens`` 0.
    """

    positions: Int32[Leaf, " tokens"]
    slots: Int32[Leaf, " tokens"]
    block_tables: Int32[Leaf, "rows width"]
    seq_lens: Int32[Leaf, " rows"]
    query_start: Int32[Leaf, " rows+1"]
    decode_only: bool = field(metadata={"static": True}, default=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMeta:
    """The `AttentionMeta` of every group of layers; see there for the fields of the same names.

    Attributes:
      slots: i32[G, T], for each group.
      block_tables: i32[G, R, W], for each group.
    """

    positions: Int32[Leaf, " tokens"]
    slots: Int32[Leaf, "groups tokens"]
    block_tables: Int32[Leaf, "groups rows width"]
    seq_lens: Int32[Leaf, " rows"]
    query_start: Int32[Leaf, " rows+1"]
    decode_only: bool = field(metadata={"static": True}, default=False)

    def of(self, group: Int32[Array, ""] | int) -> AttentionMeta:
        """Returns what the layers of a group see."""

        def own(array: Leaf) -> Leaf:
            if isinstance(group, int):
                return lax.index_in_dim(array, group, keepdims=False)
            return lax.dynamic_index_in_dim(array, group, keepdims=False)

        return AttentionMeta(
            positions=self.positions,
            slots=own(self.slots),
            block_tables=own(self.block_tables),
            seq_lens=self.seq_lens,
            query_start=self.query_start,
            decode_only=self.decode_only,
        )


class WriteFn(Protocol):
    """Writes the step's new keys and values into the cache, in place if the cache is donated."""

    def __call__(
        self,
        kv: KVCache,
        layer: LayerIndex,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        meta: AttentionMeta,
    ) -> KVCache:
        """Returns the cache with ``k`` and ``v`` [T, K, H] in the slots of ``meta``.

        `pallas_kernels.quantization` has the functions that make and read entries of every dtype.
        """
        ...


class AttendFn(Protocol):
    """Computes causal attention of the step's queries over the cache, new tokens included."""

    def __call__(
        self,
        q: Float[Array, "tokens heads head_dim"],
        kv: KVCache,
        layer: LayerIndex,
        meta: AttentionMeta,
        *,
        scale: float,
        window: Window = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Returns the attention output [T, N, H] in the dtype of ``q``, which is any float dtype.

        The query at position p of its request sees positions max(0, p - window + 1) .. p, from 0
        without a window. Scores are ``q . k * scale``, then ``soft_cap * tanh(s / soft_cap)`` if a
        cap is given. The softmax is in float32. Outputs of padding tokens are arbitrary but finite.
        """
        ...


@dataclass(frozen=True)
class AttentionShape:
    """The attention that a backend has to serve; dtypes are numpy names."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    cache_dtype: str


class CheckFn(Protocol):
    """Rejects unsupported shapes before weights are loaded."""

    def __call__(self, shape: AttentionShape) -> None:
        """Raises ConfigError if the backend cannot serve the shape on its device."""
        ...


def serves_everything(shape: AttentionShape) -> None:
    """Accepts every shape: the `CheckFn` of a backend without limits."""
    del shape


def serves_wide_caches(shape: AttentionShape) -> None:
    """Refuses caches of 8 bits: the `CheckFn` of a backend that reads entries as they are."""
    if is_quantized(shape.cache_dtype):
        raise ConfigError(
            f"this attention backend cannot read a cache of {shape.cache_dtype}; use "
            "--kv-cache-dtype auto"
        )


class CheckCacheFn(Protocol):
    """Rejects caches of an unsupported size, when it is known and before steps are compiled."""

    def __call__(self, kv: KVCache) -> None:
        """Raises ConfigError if the backend cannot serve a cache of this size."""
        ...


def serves_every_cache(kv: KVCache) -> None:
    """Accepts every cache: the `CheckCacheFn` of a backend without limits."""
    del kv


class AttentionBackend(NamedTuple):
    """The functions that write and read the cache on one kind of device.

    ``array_windows`` is true if `attend` takes windows that are arrays, so that a loop can run over
    layers with different windows. ``remark`` tells the user about a drawback of the backend on this
    device; usually empty.
    """

    name: str
    write: WriteFn
    attend: AttendFn
    check: CheckFn = serves_wide_caches
    check_cache: CheckCacheFn = serves_every_cache
    array_windows: bool = False
    remark: str = ""


BACKENDS: dict[str, str] = {
    "xla": "jaxserve.ops.xla_attention",
    "pallas_triton": "jaxserve.ops.pallas_attention",
}
"""Backend name -> module with a function ``backend(device) -> AttentionBackend``.

`load` imports the module, so a backend costs nothing until it is chosen.
"""


def load(name: str, device: Device) -> AttentionBackend:
    """Returns the backend ``name``, a key of `BACKENDS`, for a device."""
    return importlib.import_module(BACKENDS[name]).backend(device)


def select(name: str, device: Device, shape: AttentionShape) -> tuple[AttentionBackend, str]:
    """Returns the backend to use on a device, and the reason for the choice.

    Args:
      name: a key of `BACKENDS`, or "auto", which means the Pallas kernels on a GPU if they support
        the shape, and xla otherwise.
      device: the device that runs the step.
      shape: the attention to serve.

    Raises:
      ConfigError: no backend has this name, or the backend cannot serve the shape on the device.
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
        return load("xla", device), f"runs on every device, including {device.kind}"
    kernels = load("pallas_triton", device)
    try:
        kernels.check(shape)
    except ConfigError as error:
        return load("xla", device), str(error)
    return kernels, f"kernels for {device.kind}"

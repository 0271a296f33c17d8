"""Tile sizes of the kernels, from a small table by kernel, model and device.

To tune for a device, run `scripts/tune_kernels.py` and insert the entries that it prints above the
general ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

DECODE = "decode"
RAGGED = "ragged"

# A streaming multiprocessor with two programs runs one of them while the other waits for memory.
_PROGRAMS_PER_SM = 2
NUM_SMS = 132
"""Streaming multiprocessors of an H200, the default when a caller passes no number."""
# Each split adds a row of partial results that the merge pass reads.
_MAX_SPLITS = 64


@dataclass(frozen=True)
class KernelConfig:
    """The tile sizes of an attention kernel.

    Attributes:
      block_m: (query token, head) pairs of a program, a power of two of at least 16. The decode
        kernel ignores it: one of its programs serves the heads of one group.
      block_n: keys that a program reads in one iteration, a power of two of at least 16.
      num_warps: warps of a program.
      num_stages: iterations whose loads are in flight at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class _Entry:
    """A line of the table: a configuration and the calls that it applies to.

    An entry matches heads of up to ``max_head_dim``, groups of up to ``max_group`` query heads,
    operands of up to ``max_itemsize`` bytes, and devices whose name contains ``device``.
    """

    kernel: str
    config: KernelConfig
    max_head_dim: int
    max_group: int = 128
    max_itemsize: int = 2
    device: str = ""


_TABLE = (
    _Entry(DECODE, KernelConfig(16, 64, 4, 3), max_head_dim=128, max_group=32),
    _Entry(DECODE, KernelConfig(16, 32, 8, 3), max_head_dim=256),
    _Entry(DECODE, KernelConfig(16, 16, 8, 2), max_head_dim=256, max_itemsize=4),
    _Entry(RAGGED, KernelConfig(64, 64, 4, 3), max_head_dim=128, max_group=64),
    _Entry(RAGGED, KernelConfig(64, 32, 8, 3), max_head_dim=256),
    _Entry(RAGGED, KernelConfig(32, 16, 8, 2), max_head_dim=256, max_itemsize=4),
)


def kernel_config(
    kernel: str, *, head_dim: int, group: int, dtype: DTypeLike, device: str = ""
) -> KernelConfig:
    """Returns the configuration of ``kernel``: the first entry of the table that matches.

    Args:
      kernel: `DECODE` or `RAGGED`.
      head_dim: size of a head, at most 256.
      group: query heads that share a KV head, at most 128.
      dtype: operand dtype of the matrix products (`limits.dot_dtype`), at most 4 bytes.
      device: name of the device ("NVIDIA H200"), or "" if unknown.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for entry in _TABLE:
        if (
            entry.kernel == kernel
            and head_dim <= entry.max_head_dim
            and group <= entry.max_group
            and itemsize <= entry.max_itemsize
            and entry.device in device
        ):
            return entry.config
    raise AssertionError(f"the last entry for {kernel!r} must match every supported call")


def decode_splits(
    *, num_rows: int, num_kv_heads: int, max_context: int, block_n: int, num_sms: int = NUM_SMS
) -> int:
    """Returns the number of splits of each context for which a decode step fills the device twice.

    With many rows, one program for each row and KV head fills the device. Then the result is 1, and
    no merge pass runs.

    Args:
      num_rows: rows of the step, padding included.
      num_kv_heads: KV heads of a layer.
      max_context: tokens that a block table can hold.
      block_n: keys that a program reads in one iteration; a split of a full context has at least
        this many.
      num_sms: streaming multiprocessors of the device.
    """
    wanted = round(_PROGRAMS_PER_SM * num_sms / (num_rows * num_kv_heads))
    return max(1, min(wanted, -(-max_context // block_n), _MAX_SPLITS))

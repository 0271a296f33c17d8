"""Measures the attention kernels: decode in bytes per second, ragged prefill in operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gpu.models import BLOCK_SIZE, backend_for, spec_of
from gpu.options import Options
from gpu.report import Report
from gpu.timing import seconds
from gpu.workload import Pool, chained
from jaxserve.models.spec import ModelSpec
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.runner.device import current_device

DTYPE = "bfloat16"


def run(options: Options, report: Report) -> None:
    """Times both kernels at the shapes of each model, for all batch sizes and contexts."""
    for name in options.models:
        measure = _Measurement(options, report, name)
        for context in measure.contexts:
            measure.decode(context)
        for context in measure.contexts:
            measure.prefill(context)


class _Measurement:
    """The measurements of one model: its pool of keys and values, and its two programs."""

    def __init__(self, options: Options, report: Report, name: str) -> None:
        self._options, self._report, self._name = options, report, name
        self.contexts = (16, 64) if options.tiny else (512, 4096, 32768)
        self._num_calls = 2 if options.tiny else 16
        self._num_tokens = 16 if options.tiny else 8192
        self._width = max(self.contexts) // BLOCK_SIZE
        self._spec = spec_of(name)
        self._pool = Pool(self._spec, DTYPE, max(options.batches) * max(self.contexts))
        backend = backend_for("pallas_triton", self._spec, current_device(), DTYPE)
        self._attend = {
            decode_only: chained(_call(self._spec, backend, decode_only=decode_only))
            for decode_only in (True, False)
        }

    def decode(self, context: int) -> None:
        """Reports GB of keys and values read per second, for each number of requests."""
        rates: dict[str, float] = {}
        for rows in self._batches(context):
            spent = self._seconds(rows, context, np.arange(rows + 1), decode_only=True)
            num_bytes = rows * context * self._pool.bytes_per_token
            rates[str(rows)] = num_bytes / spent / 1e9
        copy = self._options.fact("copy_GBps")
        parts = {f"of_copy_{rows}": rate / copy for rows, rate in rates.items()}
        self._report.add(f"decode GB/s {self._name} context {context}", **rates, **parts)

    def prefill(self, context: int) -> None:
        """Reports TFLOP per second of both products, for each number of requests.

        The queries are the last tokens of each context.
        """
        rates: dict[str, float] = {}
        for rows in self._batches(context):
            chunk = min(self._num_tokens // rows, context)
            query_start = np.arange(rows + 1) * chunk
            spent = self._seconds(rows, context, query_start, decode_only=False)
            pairs = rows * (chunk * context - chunk * (chunk - 1) // 2)
            operations = 4 * self._spec.num_heads * self._spec.head_dim * pairs
            rates[str(rows)] = operations / spent / 1e12
        peak = self._options.fact("matmul_TFLOPps")
        parts = {f"of_matmul_{rows}": rate / peak for rows, rate in rates.items()}
        self._report.add(f"prefill TFLOP/s {self._name} context {context}", **rates, **parts)

    def _batches(self, context: int) -> list[int]:
        return [rows for rows in self._options.batches if self._pool.holds(rows, context)]

    def _seconds(
        self, rows: int, context: int, query_start: np.ndarray, *, decode_only: bool
    ) -> float:
        """Returns the seconds of one call."""
        tables = self._pool.tables(self._num_calls, rows, context, width=self._width)
        seq_lens = jnp.full(rows, context, jnp.int32)
        starts = jnp.asarray(query_start, jnp.int32)
        q = self._pool.queries(rows if decode_only else self._num_tokens)
        attend = self._attend[decode_only]
        return seconds(attend, q, self._pool.kv, tables, seq_lens, starts) / self._num_calls


def _call(spec: ModelSpec, backend: AttentionBackend, *, decode_only: bool):
    def call(
        q: jax.Array, kv: KVCache, table: jax.Array, seq_lens: jax.Array, starts: jax.Array
    ) -> jax.Array:
        unused = jnp.zeros(len(q), jnp.int32)
        meta = AttentionMeta(unused, unused, table, seq_lens, starts, decode_only=decode_only)
        return backend.attend(q, kv, 0, meta, scale=spec.head_dim**-0.5)

    return call

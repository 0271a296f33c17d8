"""Compiles whole steps of an engine for an H200 without a GPU: cases, and checks of the result."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from aot_dump import LISTING, dump_options, find_kernels, read_launches, resources
from gpu.models import BLOCK_SIZE, abstract_cache, abstract_params, backend_for, spec_of

from jaxserve.core.plan import StepPlan
from jaxserve.device import Device
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import NARROW_TABLE, Bucket
from jaxserve.runner.jit import pack
from jaxserve.runner.kv_cache import bytes_per_token
from jaxserve.runner.step import StepState, make_step
from pallas_kernels.testing import deviceless

DEVICE = Device("gpu", deviceless.DEVICE, 0, True, compute_capability=(9, 0), num_cores=132)
DTYPE = "bfloat16"
MAX_NUM_SEQS = 256
# The cache fills most of the memory, as on a device, because the compiler's choices depend on the
# free memory.
CACHE_BYTES = 100 * 10**9

STEP_COLUMNS = "{:36s} {:>6s} {:>7s} {:>7s} {:>8s} {:>5s} {:>13s} {:>13s} {:>11s} {:>6s} {:>5s}"
STEP_HEADER = (
    "step",
    "graphs",
    "in them",
    "outside",
    "kernels",
    "spill",
    "state bytes",
    "alias bytes",
    "temp bytes",
    "copies",
    "again",
)


@dataclass(frozen=True)
class StepCase:
    """A bucket of an engine that runs a model of `gpu.models.CONFIGS`."""

    model: str
    num_tokens: int
    num_rows: int

    @property
    def name(self) -> str:
        """The name in the table."""
        kind = "decode" if self.num_tokens == self.num_rows else f"{self.num_tokens} tokens,"
        return f"step {self.model} {kind} {self.num_rows} rows"


@dataclass(frozen=True)
class StepReport:
    """The properties of a compiled step.

    Attributes:
      num_graphs: CUDA graphs that the host launches.
      num_in_graphs: operations inside the graphs.
      outside: operations that the host launches one by one.
      num_kernels: distinct kernels of the program, including those that the compiler generates.
      spilling: names of the kernels that spill registers to memory.
      state_bytes: size of the KV cache and the last tokens, which are donated.
      alias_bytes: size of the results that reuse the memory of arguments.
      temp_bytes: memory of the program besides arguments and results.
      copies: instructions that write an array of the size of a cache, not in place.
      recomputed: instructions that the compiler duplicates to save memory.
    """

    num_graphs: int
    num_in_graphs: int
    outside: tuple[str, ...]
    num_kernels: int
    spilling: tuple[str, ...]
    state_bytes: int
    alias_bytes: int
    temp_bytes: int
    copies: tuple[str, ...]
    recomputed: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """The violated requirements, as messages."""
        found = []
        if self.num_graphs != 1 or self.outside:
            found.append(f"{self.num_graphs} graphs, outside of graphs {list(self.outside)}")
        if self.spilling:
            found.append(f"registers spill in {', '.join(self.spilling)}")
        if self.alias_bytes != self.state_bytes:
            found.append(f"{self.alias_bytes} of {self.state_bytes} bytes are written in place")
        if self.copies:
            found.append(f"the cache is copied: {'; '.join(self.copies)}")
        if self.recomputed:
            found.append(f"recomputed: {', '.join(self.recomputed)}")
        return found

    def row(self, case: str) -> str:
        """Returns the line of the table for a case."""
        numbers = (
            self.num_graphs,
            self.num_in_graphs,
            len(self.outside),
            self.num_kernels,
            len(self.spilling),
            self.state_bytes,
            self.alias_bytes,
            self.temp_bytes,
            len(self.copies),
            len(self.recomputed),
        )
        return STEP_COLUMNS.format(case, *map(str, numbers))


def step_cases() -> Iterator[StepCase]:
    """Yields decode with and without split contexts, and a mixed step, for two models."""
    for model in ("smollm2-135m", "llama-3.1-8b"):
        yield StepCase(model, 8, 8)
        yield StepCase(model, MAX_NUM_SEQS, MAX_NUM_SEQS)
        yield StepCase(model, 8192, 8)


def compile_step(
    case: StepCase, folder: Path, ptxas: str, *, num_layers: int | None = None
) -> StepReport:
    """Compiles a step without allocating arrays.

    Args:
      case: the step.
      folder: receives the compiler's files.
      ptxas: the assembler.
      num_layers: layers of the model; None: all.
    """
    spec = spec_of(case.model, num_layers=num_layers)
    bind, params = abstract_params(spec, DTYPE)
    per_block = BLOCK_SIZE * bytes_per_token(
        num_layers=spec.cache_layout.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=DTYPE,
    )
    num_blocks = CACHE_BYTES // per_block
    kv = abstract_cache(spec, num_blocks=num_blocks, dtype=DTYPE)
    last_tokens: Any = jax.ShapeDtypeStruct((MAX_NUM_SEQS,), "int32")
    state = StepState(kv, last_tokens)
    batch = BatchBuilder(
        num_rows=MAX_NUM_SEQS,
        table_width=NARROW_TABLE,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_groups=len(spec.cache_layout.windows),
    )
    bucket = Bucket(case.num_tokens, case.num_rows, NARROW_TABLE)
    inputs = batch.build(StepPlan(step_id=-1, scheduled=()), bucket)
    program = deviceless.compile_for_h200(
        make_step(bind, backend_for("pallas_triton", spec, DEVICE, DTYPE)),
        params,
        state,
        pack(inputs),
        compiler_options=dump_options(folder),
    )
    return report_of(program, state, folder, ptxas)


def report_of(
    program: jax.stages.Compiled, state: StepState, folder: Path, ptxas: str
) -> StepReport:
    """Returns the report on a compiled step with this state, from the dump in ``folder``."""
    (listing,) = folder.glob(LISTING)
    launches = read_launches(listing)
    codes = find_kernels(folder)
    memory, text = program.memory_analysis(), program.as_text()
    return StepReport(
        num_graphs=launches.num_graphs,
        num_in_graphs=launches.num_in_graphs,
        outside=launches.outside,
        num_kernels=len(codes),
        spilling=tuple(name for name, code in codes.items() if resources(code, ptxas)[1]),
        state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copies=find_copies(text, state.kv.k.shape),
        recomputed=tuple(re.findall(r"^\s+%?(\S+\.remat\S*) = ", text, re.MULTILINE)),
    )


def find_copies(text: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the instructions of a program that write an array with as many elements as a cache.

    Instructions that only name an array (parameters, tuples, bitcasts) do not count. Custom calls
    do not count either: if a kernel does not write in place, the memory figures show it.

    Args:
      text: the program in HLO.
      shape: shape of the cache.
    """
    size = math.prod(shape)
    harmless = {"parameter", "get-tuple-element", "bitcast", "tuple", "custom-call"}
    found = []
    for line in text.splitlines():
        made = re.match(r"\s+(?:ROOT )?%?(\S+) = \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if made is None or made[3] in harmless:
            continue
        if math.prod(map(int, made[2].split(","))) >= size:
            found.append(f"{made[3]} {made[1]}")
    return tuple(found)

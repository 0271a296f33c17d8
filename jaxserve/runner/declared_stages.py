"""Runs the declared stages of the sampler, each only in steps in which a request uses it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.jit import CompilationLog, Packed, Program, pack
from jaxserve.sampling.declaration import (
    ALL_TOKENS,
    Stage,
    StageRows,
    apply_stage,
    check_function,
)
from jaxserve.sampling.inputs import LastTokens, SamplingInputs
from jaxserve.sampling.sampler import prepare_filters
from jaxserve.sampling.stages import Logits

MIN_TOKENS = 256
"""The smallest number of tokens per row that a stage with `ALL_TOKENS` is compiled for."""


@dataclass(frozen=True)
class StageWork:
    """The inputs of the stages of one step, as numpy arrays, in the order in which they run.

    Attributes:
      processors: the index of each logits processor to run, and its rows.
      filters: the same for each sampling filter.
    """

    processors: Sequence[tuple[int, StageRows]] = ()
    filters: Sequence[tuple[int, StageRows]] = ()


NO_STAGES = StageWork()


class DeclaredStages:
    """The declared stages of an engine, and which running requests use them.

    Each stage is a program of its own, compiled for the sampler's numbers of rows. So a stage costs
    nothing until a request uses it, and requests with different stages share programs. A stage with
    `ALL_TOKENS` is compiled for a few numbers of tokens besides.

    Args:
      stages: in the order in which they run.
      max_model_len: the most tokens of a request.
      log: receives the compilations.
    """

    def __init__(self, stages: Sequence[Stage], *, max_model_len: int, log: CompilationLog) -> None:
        self._stages = tuple(stages)
        self._widths = [_widths(stage, max_model_len) for stage in stages]
        self._programs = [_stage_program(stage, log) for stage in stages]
        # Engine row -> index of a stage -> entries. Only for rows that use a stage. Those of a
        # finished request stay until its row is reused.
        self._entries: dict[int, dict[int, dict[str, np.ndarray]]] = {}

        @functools.partial(jax.jit, donate_argnums=0)
        def prepare_step(logits: Logits, packed: Packed) -> Logits:
            return prepare_filters(logits, packed.unpack())

        self._prepare = Program("temperature and min_p before filters", prepare_step, log)

    def check(self, sizes: Sequence[int], vocab_size: int) -> None:
        """Traces each stage for every shape of its programs, so that no step is the first to do it.

        Args:
          sizes: the sampler's numbers of rows.
          vocab_size: V.

        Raises:
          ConfigError: a stage fails, or does not return logits.
        """
        for stage, widths in zip(self._stages, self._widths, strict=True):
            check_function(stage, vocab_size, itertools.product(sizes, widths))

    def admit(self, part: ScheduledRequest) -> None:
        """Stores what the stages need of a new request in its row."""
        self._entries.pop(part.row, None)
        used = {
            k: stage.entries(stage.values(part.params))
            for k, stage in enumerate(self._stages)
            if stage.is_used_by(part.params)
        }
        if used:
            self._entries[part.row] = used

    def users(self, plan: StepPlan) -> Sequence[int]:
        """Returns the rows of the step that sample for a request with a stage."""
        if not self._entries:
            return ()
        return [i for i, p in enumerate(plan.rows) if p.samples and p.row in self._entries]

    def gather(self, plan: StepPlan, to_sample: Sequence[int], inputs: SamplingInputs) -> StageWork:
        """Builds the rows of the stages that run in a step.

        Args:
          plan: the plan of the step.
          to_sample: indices in ``plan.rows`` of the rows to sample.
          inputs: the parameters of these rows, as numpy arrays.
        """
        if not self._entries:
            return NO_STAGES
        plan_rows = plan.rows
        parts = [plan_rows[i] for i in to_sample]
        used = sorted({k for part in parts for k in self._entries.get(part.row, ())})
        rows = [(k, self._rows(k, parts, inputs)) for k in used]
        return StageWork(
            processors=[(k, each) for k, each in rows if not self._stages[k].is_filter],
            filters=[(k, each) for k, each in rows if self._stages[k].is_filter],
        )

    def process(self, logits: Logits, last_tokens: LastTokens, work: StageWork) -> Logits:
        """Applies the logits processors to f32[R, V], which is donated."""
        for k, rows in work.processors:
            logits = self._apply(k, logits, last_tokens, rows)
        return logits

    def filter(
        self, logits: Logits, last_tokens: LastTokens, work: StageWork, inputs: SamplingInputs
    ) -> tuple[Logits, SamplingInputs]:
        """Applies temperature, min_p and the sampling filters to f32[R, V], which is donated.

        ``inputs`` are the parameters of the rows, as numpy arrays.

        Returns:
          (logits f32[R, V], the inputs of `sample` for the rest).
        """
        users = " and ".join(self._stages[k].name for k, _ in work.filters)
        logits = self._prepared(logits, inputs, users)
        for k, rows in work.filters:
            logits = self._apply(k, logits, last_tokens, rows)
        # Dividing by 1 is exact.
        ones = np.where(np.asarray(inputs.temperature) > 0, 1, 0).astype(np.float32)
        return logits, replace(inputs, temperature=ones, min_p=np.zeros_like(ones))

    def warm_ups(
        self,
        sizes: Sequence[int],
        no_logits: Callable[[int], Logits],
        no_inputs: Callable[[int], SamplingInputs],
        last_tokens: LastTokens,
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields a name and a function that compiles a program, for each program to warm up.

        Args:
          sizes: the sampler's numbers of rows.
          no_logits: returns f32[R, V] for R rows.
          no_inputs: returns the inputs of R rows that hold no request.
          last_tokens: i32[S], any tokens, on the devices of the sampler.
        """
        warm = [k for k, stage in enumerate(self._stages) if stage.warm_up]
        for size in sizes:
            for k in warm:
                for width in self._widths[k]:
                    yield (
                        f"stage {self._stages[k].name} for {_shapes(size, width)}",
                        functools.partial(self._warm_up, k, size, width, no_logits, last_tokens),
                    )
            if any(self._stages[k].is_filter for k in warm):
                yield (
                    f"temperature and min_p before filters of {size} rows",
                    functools.partial(self._warm_up_filters, size, no_logits, no_inputs),
                )

    def _warm_up(
        self,
        k: int,
        size: int,
        width: int,
        no_logits: Callable[[int], Logits],
        last_tokens: LastTokens,
    ) -> Logits:
        rows = self._stages[k].empty_rows(size, width)
        return self._apply(k, no_logits(size), last_tokens, rows)

    def _warm_up_filters(
        self,
        size: int,
        no_logits: Callable[[int], Logits],
        no_inputs: Callable[[int], SamplingInputs],
    ) -> Logits:
        return self._prepared(no_logits(size), no_inputs(size), "filters")

    def _prepared(self, logits: Logits, inputs: SamplingInputs, users: str) -> Logits:
        """Applies temperature and min_p. ``users`` names the filters that need it, for the log."""
        packed = pack(inputs.without_tokens())
        return self._prepare(logits, packed, shapes=f"{len(logits)} rows, for {users}")

    def _apply(self, k: int, logits: Logits, last_tokens: LastTokens, rows: StageRows) -> Logits:
        shapes = _shapes(len(logits), rows.tokens.shape[1])
        return self._programs[k](logits, last_tokens, pack(rows), shapes=shapes)

    def _rows(self, k: int, parts: Sequence[ScheduledRequest], inputs: SamplingInputs) -> StageRows:
        """Returns the inputs of stage ``k`` for the parts, padded to the rows of ``inputs``."""
        used = [(i, p) for i, p in enumerate(parts) if k in self._entries.get(p.row, ())]
        longest = max(part.start + part.num_tokens for _, part in used)
        width = next((w for w in self._widths[k] if w >= longest), self._widths[k][-1])
        rows = replace(
            self._stages[k].empty_rows(len(inputs.positions), width),
            seeds=inputs.seeds,
            positions=inputs.positions,
        )
        is_on, num_output, tokens, pending_row = map(
            np.asarray, (rows.is_on, rows.num_output_tokens, rows.tokens, rows.pending_row)
        )
        for i, part in used:
            is_on[i] = 1
            num_output[i] = part.start + part.num_tokens - part.num_prompt_tokens
            for name, entry in self._entries[part.row][k].items():
                rows.arrays[name][i] = entry
            if not width:
                continue
            assert part.num_unknown_tokens <= 1, "a row stores one unknown token"
            room = width - part.num_unknown_tokens
            known = part.known_token_ids[-room:] if room else ()
            tokens[i, room - len(known) : room] = known
            if part.num_unknown_tokens:
                pending_row[i] = part.row
        return rows


def _stage_program(stage: Stage, log: CompilationLog) -> Program:
    @functools.partial(jax.jit, donate_argnums=0)
    def stage_step(logits: Logits, last_tokens: LastTokens, packed: Packed) -> Logits:
        return apply_stage(stage, logits, last_tokens, packed.unpack())

    return Program(f"stage {stage.name}", stage_step, log)


def _widths(stage: Stage, max_model_len: int) -> tuple[int, ...]:
    """Returns the numbers of tokens per row that a stage is compiled for, in ascending order."""
    if stage.num_tokens != ALL_TOKENS:
        return (stage.num_tokens,)
    widths = [min(MIN_TOKENS, max_model_len)]
    while widths[-1] < max_model_len:
        widths.append(min(4 * widths[-1], max_model_len))
    return tuple(widths)


def _shapes(num_rows: int, num_tokens: int) -> str:
    return f"{num_rows} rows" + (f", {num_tokens} tokens" if num_tokens else "")

"""Runs plans on the device and returns their results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import Sizes, StepPlan
from jaxserve.core.speculation import non_decreasing
from jaxserve.ops.attention import AttentionBackend, KVCache
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.declared_stages import DeclaredStages
from jaxserve.runner.draft_rows import PlacedRows
from jaxserve.runner.jit import CompilationLog, Program, pack
from jaxserve.runner.pending import PendingStep
from jaxserve.runner.placement import ONE_DEVICE, Placement, specs
from jaxserve.runner.pooling import Pooler
from jaxserve.runner.prompt_logprobs import PromptScorer
from jaxserve.runner.proposer import ProposeFn
from jaxserve.runner.sampler_warm_ups import SamplerWarmUps
from jaxserve.runner.sampling_work import NO_REQUESTS, Sampled, SamplingWork, Verify
from jaxserve.runner.speculator import Speculator
from jaxserve.runner.step import Forward, LanguageModel, StepState, make_step
from jaxserve.runner.token_sampler import TokenSampler
from jaxserve.sampling.declaration import Stage

NO_DRAFTS = StepPlan(step_id=-1, scheduled=(), speculates=True)
"""A plan without requests that runs the programs of drafts."""

MEASURED_STEPS = 3
"""The number of runs of each size of step, of which the fastest counts."""


class ModelRunner:
    """Holds weights, KV cache and last tokens on the device, and runs steps over them.

    Steps run in the order of the calls of `execute`, which does not wait for the device. So a step
    may use tokens that the step before it samples.

    Args:
      bind: makes the model from ``params``; called while a step is traced.
      params: the weights, a pytree of device arrays.
      kv: the KV cache. The runner owns it from now on.
      attention: the attention backend.
      sizes: the sizes of the engine.
      vocab_size: the width of the logits.
      table_widths: the widths of block tables to compile for; see `Buckets`.
      logprobs_mode: see `LogprobsConfig`.
      stages: the declared stages of the sampler.
      placement: the devices of ``params`` and ``kv``. The sampler runs on all of them alike, since
        each has all logits and last tokens.
      propose: proposes the drafts of plans that speculate, ``sizes.max_drafts`` at most.
      checks_finite: whether a request ends when its logits or its vector are not finite. If not,
        its tokens are those that `argmax` and the sampler happen to give.

    Attributes:
      buckets: the shapes of steps.
      step_costs: see `Speculation`; empty before `warm_up` and without speculation.
    """

    def __init__(
        self,
        bind: Callable[[Any], LanguageModel],
        params: Any,
        kv: KVCache,
        *,
        attention: AttentionBackend,
        sizes: Sizes,
        vocab_size: int,
        table_widths: tuple[int, ...],
        logprobs_mode: LogprobsMode = "raw_logprobs",
        stages: Sequence[Stage] = (),
        placement: Placement = ONE_DEVICE,
        propose: ProposeFn | None = None,
        checks_finite: bool = True,
    ) -> None:
        rows = sizes.max_num_seqs
        self._log = CompilationLog()
        self._params = params
        self._state = StepState(kv, jnp.zeros(rows, jnp.int32, device=placement.sharding()))
        param_specs = specs(params)
        step = make_step(
            bind, attention, placement, param_specs=param_specs, checks_finite=checks_finite
        )
        self._step = Program("step", step, self._log)
        self._sampler = TokenSampler(
            num_rows=rows,
            max_num_rows=sizes.max_num_rows,
            vocab_size=vocab_size,
            logprobs_mode=logprobs_mode,
            log=self._log,
            stages=DeclaredStages(stages, max_model_len=sizes.max_model_len, log=self._log),
            sharding=placement.sharding(),
        )
        self._scorer = PromptScorer(
            bind,
            vocab_size,
            logprobs_mode=logprobs_mode,
            log=self._log,
            placement=placement,
            param_specs=param_specs,
            checks_finite=checks_finite,
        )
        self._checks_finite = checks_finite
        self._pooler = Pooler(bind, log=self._log)
        self._block_size = sizes.block_size
        self.buckets = Buckets(
            max_num_rows=sizes.max_num_rows,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            table_widths=table_widths,
        )
        self._batch = BatchBuilder(
            num_rows=rows,
            table_width=max(table_widths),
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_groups=len(sizes.windows),
        )
        self._speculator = None
        if propose is not None:
            self._speculator = Speculator(
                propose, sizes, log=self._log, sharding=placement.sharding()
            )
        self.step_costs: tuple[tuple[int, float], ...] = ()

    @property
    def num_compilations(self) -> int:
        """Programs compiled, or loaded from the cache of compiled programs, since the start."""
        return len(self._log.programs)

    def execute(self, plan: StepPlan) -> PendingStep:
        """Starts a step and returns without waiting for it.

        The sampling of a constrained plan is left to the caller; see `StepHandle`.
        """
        for part in plan.scheduled:
            if part.is_new:
                self._sampler.admit(part)
            if part.starts_speculation:
                self._drafting.start(part, self._state.last_tokens)
        bucket = self.buckets.smallest_for(plan, self._block_size)
        needs = self._sampler.needs(plan)
        forward, placed = self._run(plan, bucket, frozenset(needs.to_sample))
        scores = self._scorer.start(self._params, forward.hidden, plan)
        pooled = self._pooler.start(self._params, forward.hidden, plan)
        positions = None if placed is None else placed.next_positions
        work = self._sampler.gather(plan, needs, forward.logits, positions)
        verify = None
        if placed is not None:
            verify = functools.partial(self._drafting.accept, placed, forward.most_likely)
        sample = functools.partial(self._sample, verify=verify)
        step = PendingStep(
            plan,
            forward.most_likely,
            work,
            sample,
            scores=scores,
            pooled=pooled,
            checks_finite=self._checks_finite,
        )
        if not plan.is_constrained:
            step.sample()
        return step

    def warm_up(self, on_program: Callable[[int, int, str], None]) -> None:
        """Compiles every bucket and the common sampling programs, by running each on padding.

        If the engine speculates, it also measures `step_costs`.

        ``on_program(done, total, name)`` is called before each program, and once at the end.
        """
        buckets = self.buckets.all
        hidden: dict[int, jax.Array] = {}

        def run_step(bucket: Bucket, plan: StepPlan = NO_REQUESTS) -> Forward:
            forward, _ = self._run(plan, bucket)
            hidden[bucket.num_tokens] = forward.hidden
            return forward

        programs: list[tuple[str, Callable[[], Any]]] = [
            (_name(bucket), functools.partial(run_step, bucket)) for bucket in buckets
        ]
        num_rows = {bucket.num_rows for bucket in buckets}
        if self._speculator is None:
            programs += SamplerWarmUps(self._sampler).programs(num_rows)
        else:
            programs += [
                (f"drafts, {_name(bucket)}", functools.partial(run_step, bucket, NO_DRAFTS))
                for bucket in buckets
            ]
            programs += self._speculator.warm_ups(num_rows, self._sampler.sizes)
            programs += SamplerWarmUps(self._sampler).programs(num_rows, num_drawn=max(num_rows))
        sizes = {bucket.num_tokens for bucket in buckets}
        programs += self._scorer.warm_ups(self._params, hidden, sizes)
        with self._log.expected():
            for done, (name, run) in enumerate(programs):
                on_program(done, len(programs), name)
                jax.block_until_ready(run())
            if self._speculator is not None:
                self.step_costs = self._measure_steps()
        on_program(len(programs), len(programs), "")

    def _measure_steps(self) -> tuple[tuple[int, float], ...]:
        """Returns the numbers of rows of decode steps, and the seconds that each takes.

        Only those with narrow block tables: attention stops at the end of each request, so that the
        width of a table takes no time.
        """
        costs = []
        narrow = min(bucket.table_width for bucket in self.buckets.all)
        for bucket in self.buckets.all:
            if not bucket.decode_only or bucket.table_width != narrow:
                continue
            seconds = []
            for _ in range(MEASURED_STEPS):
                start = time.perf_counter()
                jax.block_until_ready(self._run(NO_DRAFTS, bucket))
                seconds.append(time.perf_counter() - start)
            costs.append((bucket.num_rows, min(seconds)))
        return non_decreasing(costs)

    @property
    def _drafting(self) -> Speculator:
        assert self._speculator is not None, "the plan speculates, and there is no proposer"
        return self._speculator

    def _run(
        self, plan: StepPlan, bucket: Bucket, to_sample: Container[int] = ()
    ) -> tuple[Forward, PlacedRows | None]:
        """Starts the forward pass. ``to_sample``: see `BatchBuilder.build`."""
        packed, placed = pack(self._batch.build(plan, bucket, to_sample=to_sample)), None
        if plan.speculates:
            packed, placed = self._drafting.place(plan, bucket, packed)
        shapes = _name(bucket)
        self._state, forward = self._step(self._params, self._state, packed, shapes=shapes)
        return forward, placed

    def _sample(self, work: SamplingWork, verify: Verify | None) -> Sampled:
        """Starts the sampler for the step that was started last."""
        last_tokens, sampled = self._sampler.finish(work, self._state.last_tokens, verify)
        self._state = StepState(self._state.kv, last_tokens)
        return sampled


def _name(bucket: Bucket) -> str:
    return f"{bucket.num_tokens} tokens, {bucket.num_rows} rows, {bucket.table_width} blocks"

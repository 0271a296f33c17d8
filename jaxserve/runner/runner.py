"""Runs plans on the device and returns their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import Sizes, StepPlan, StepResult
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.ops.attention import AttentionBackend, KVCache
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.jit import CompilationLog, Program, pack
from jaxserve.runner.pooling import PooledVectors, Pooler
from jaxserve.runner.prompt_logprobs import PromptScorer, PromptScores
from jaxserve.runner.step import Forward, LanguageModel, StepState, make_step
from jaxserve.runner.token_sampler import NO_REQUESTS, Sampled, SamplingWork, TokenSampler
from jaxserve.sampling.logprobs import to_message


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
    ) -> None:
        rows = sizes.max_num_seqs
        self._log = CompilationLog()
        self._params = params
        self._state = StepState(kv, jnp.zeros(rows, jnp.int32))
        self._step = Program("step", make_step(bind, attention), self._log)
        self._sampler = TokenSampler(
            num_rows=rows, vocab_size=vocab_size, logprobs_mode=logprobs_mode, log=self._log
        )
        self._scorer = PromptScorer(bind, vocab_size, logprobs_mode=logprobs_mode, log=self._log)
        self._pooler = Pooler(bind, log=self._log)
        self._block_size = sizes.block_size
        self.buckets = Buckets(
            max_num_seqs=rows,
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
        bucket = self.buckets.smallest_for(plan, self._block_size)
        needs = self._sampler.needs(plan)
        forward = self._run(plan, bucket, frozenset(needs.to_sample))
        scores = self._scorer.start(self._params, forward.hidden, plan)
        pooled = self._pooler.start(self._params, forward.hidden, plan)
        work = self._sampler.gather(plan, needs, forward.logits)
        step = PendingStep(
            plan, forward.most_likely, work, self._sample, scores=scores, pooled=pooled
        )
        if not plan.is_constrained:
            step.sample()
        return step

    def warm_up(self, on_program: Callable[[int, int, str], None]) -> None:
        """Compiles every bucket and the common sampling programs, by running each on padding.

        ``on_program(done, total, name)`` is called before each program, and once at the end.
        """
        buckets = self.buckets.all
        hidden: dict[int, jax.Array] = {}

        def run_step(bucket: Bucket) -> Forward:
            forward = self._run(NO_REQUESTS, bucket)
            hidden[bucket.num_tokens] = forward.hidden
            return forward

        programs: list[tuple[str, Callable[[], Any]]] = [
            (_name(bucket), functools.partial(run_step, bucket)) for bucket in buckets
        ]
        programs += self._sampler.warm_ups({bucket.num_rows for bucket in buckets})
        sizes = {bucket.num_tokens for bucket in buckets}
        programs += self._scorer.warm_ups(self._params, hidden, sizes)
        with self._log.expected():
            for done, (name, run) in enumerate(programs):
                on_program(done, len(programs), name)
                jax.block_until_ready(run())
        on_program(len(programs), len(programs), "")

    def _run(self, plan: StepPlan, bucket: Bucket, to_sample: Container[int] = ()) -> Forward:
        """Starts the forward pass. ``to_sample``: see `BatchBuilder.build`."""
        inputs = self._batch.build(plan, bucket, to_sample=to_sample)
        shapes = _name(bucket)
        self._state, forward = self._step(self._params, self._state, pack(inputs), shapes=shapes)
        return forward

    def _sample(self, work: SamplingWork) -> Sampled:
        """Starts the sampler for the step that was started last."""
        last_tokens, sampled = self._sampler.finish(work, self._state.last_tokens)
        self._state = StepState(self._state.kv, last_tokens)
        return sampled


class PendingStep:
    """A step in flight: forward pass started -> `sample` -> sampler started -> `result`.

    Args:
      plan: the plan of the step.
      most_likely: i32[R], the most likely token of each request.
      work: the sampler's part of the step.
      run_sampler: starts that part without waiting for it.
      scores: the prompt log probabilities of the step, or None.
      pooled: the pooled vectors of the step, or None.
    """

    def __init__(
        self,
        plan: StepPlan,
        most_likely: Int32[Array, " rows"],
        work: SamplingWork,
        run_sampler: Callable[[SamplingWork], Sampled],
        *,
        scores: PromptScores | None,
        pooled: PooledVectors | None,
    ) -> None:
        self._plan = plan
        self._most_likely = most_likely
        self._work = work
        self._run_sampler = run_sampler
        self._scores = scores
        self._pooled = pooled
        self._sampled: Sampled | None = None
        most_likely.copy_to_host_async()

    def sample(self) -> None:
        """Starts the sampler. Call it once, before the next step is executed."""
        assert self._sampled is None, "sampled already"
        self._sampled = self._run_sampler(self._work)
        for array in jax.tree.leaves(self._sampled):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Waits for the step and returns its results. Call it once, after `sample`."""
        assert self._sampled is not None, "not sampled yet"
        sampled = jax.tree.map(np.asarray, self._sampled)
        tokens = np.array(self._most_likely)
        if sampled.tokens is not None:
            indices = list(self._work.needs.to_sample)
            tokens[indices] = sampled.tokens[: len(indices)]
        indices = [i for i, part in enumerate(self._plan.scheduled) if part.samples]
        return StepResult(
            tokens[indices].tolist(),
            None if sampled.logprobs is None else self._logprobs(sampled, tokens, indices),
            prompt_logprobs=() if self._scores is None else self._scores.result(),
            pooled=() if self._pooled is None else self._pooled.result(),
        )

    def _logprobs(
        self, sampled: Sampled, tokens: Int32[np.ndarray, " rows"], indices: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Returns an entry for each of ``indices``, or None if that request asked for none."""
        assert sampled.logprobs is not None
        found = {}
        for row, i in enumerate(self._work.needs.to_score):
            k = self._plan.scheduled[i].params.logprobs
            assert k is not None
            found[i] = to_message(sampled.logprobs, row, int(tokens[i]), k)
        return [found.get(i) for i in indices]


def _name(bucket: Bucket) -> str:
    return f"{bucket.num_tokens} tokens, {bucket.num_rows} rows, {bucket.table_width} blocks"

"""Runs plans on the device."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import Sizes
from jaxserve.core.plan import StepPlan
from jaxserve.ops.attention import AttentionBackend, KVCache
from jaxserve.runner.batch import BatchBuilder
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.in_flight import StepInFlight
from jaxserve.runner.packing import pack
from jaxserve.runner.pooling import Pooler
from jaxserve.runner.prompt_logprobs import PromptScorer
from jaxserve.runner.sampling_batch import SamplingBatchBuilder, fill_masks
from jaxserve.runner.step import LanguageModel, StepState, make_sample_step, make_step
from jaxserve.sampling.rows import GREEDY, SamplingFeatures, SamplingRows
from jaxserve.sampling.sampler import Sampled

logger = logging.getLogger("jaxserve")

WARM_FEATURES = (
    GREEDY,
    SamplingFeatures(random=True),
    SamplingFeatures(random=True, filters=True),
)
"""What is compiled before the first request, for every number of rows."""

NO_REQUESTS = StepPlan(step_id=-1, scheduled=())


class ModelRunner:
    """Holds weights, KV cache and last tokens on the device, and runs steps over them.

    Steps run in the order in which they are given, so a step may use what the one before it
    samples. `execute` does not wait for the device.

    Args:
      bind: makes the model from ``params``; called while a step is traced.
      params: the weights, a pytree of device arrays.
      kv: the KV cache. The runner owns it from now on.
      attention: the kernels for the cache.
      sizes: of the engine.
      vocab_size: the width of the logits.
      table_widths: the widths of block tables to compile for; see `Buckets`.
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
    ) -> None:
        rows = sizes.max_num_seqs
        self._params = params
        self._state = StepState(kv, jnp.zeros(rows, jnp.int32))
        self._step = make_step(bind, attention)
        self._sample_step = make_sample_step()
        self._scorer = PromptScorer(bind, vocab_size)
        self._pooler = Pooler(bind)
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
        )
        self._sampling = SamplingBatchBuilder(num_rows=rows, vocab_size=vocab_size)

    @property
    def num_compilations(self) -> int:
        """Programs compiled, or loaded from the cache of compiled programs, since the start."""
        jitted: tuple[Any, ...] = (self._step, self._sample_step)
        compiled = sum(each._cache_size() for each in jitted)
        return compiled + self._scorer.num_compilations + self._pooler.num_compilations

    def execute(self, plan: StepPlan) -> StepInFlight:
        """Starts a step and returns without waiting for it."""
        for part in plan.scheduled:
            if part.is_new:
                self._sampling.admit(part)
        bucket = self.buckets.smallest_for(plan, self._block_size)
        features = self._sampling.features(plan.sampling)
        with self._logging_compilations(bucket, features):
            return self._run(plan, bucket, features)

    def warm_up(self, on_program: Callable[[int, int, str], None]) -> None:
        """Compiles every bucket, and the common ways to sample, by running them without requests.

        ``on_program(done, total, name)`` is called before each program, and once at the end.
        """
        programs = [(bucket, GREEDY) for bucket in self.buckets.all]
        cheapest = {bucket.num_rows: bucket for bucket in reversed(self.buckets.all)}
        programs += [
            (bucket, features) for bucket in cheapest.values() for features in WARM_FEATURES[1:]
        ]
        for done, (bucket, features) in enumerate(programs):
            on_program(done, len(programs), _program_name(bucket, features))
            self._run(NO_REQUESTS, bucket, features).result()
        on_program(len(programs), len(programs), "")

    @contextlib.contextmanager
    def _logging_compilations(self, bucket: Bucket, features: SamplingFeatures) -> Iterator[None]:
        """Says so if a program is compiled inside, since that holds everybody up."""
        before, start = self.num_compilations, time.perf_counter()
        yield
        if self.num_compilations > before:
            seconds = time.perf_counter() - start
            logger.warning("compiled during a request (%.1f s): %s, %s", seconds, bucket, features)

    def _run(self, plan: StepPlan, bucket: Bucket, features: SamplingFeatures) -> StepInFlight:
        inputs = self._batch.build(plan, bucket, keep_tokens=features == GREEDY)
        self._state, forward = self._step(self._params, self._state, pack(inputs))
        in_flight = functools.partial(
            StepInFlight,
            plan,
            scores=self._scorer.start(self._params, forward.hidden, plan),
            pooled=self._pooler.start(self._params, forward.hidden, plan),
        )
        if features == GREEDY:
            return in_flight(Sampled(forward.best, None))
        rows = self._sampling.build(plan, bucket.num_rows, features)
        sample = functools.partial(self._sample, forward.logits, rows, features)
        if not plan.is_constrained:
            return in_flight(sample())

        def fill_masks_and_sample() -> Sampled:
            fill_masks(plan, rows)
            with self._logging_compilations(bucket, features):
                return sample()

        return in_flight(fill_masks_and_sample)

    def _sample(self, logits: jax.Array, rows: SamplingRows, features: SamplingFeatures) -> Sampled:
        """Starts the sampling of a step, the last one that was started."""
        last_tokens, sampled = self._sample_step(
            logits, self._state.last_tokens, pack(rows), features=features
        )
        self._state = StepState(self._state.kv, last_tokens)
        return sampled


def _program_name(bucket: Bucket, features: SamplingFeatures) -> str:
    if features != GREEDY:
        return f"sampling of {bucket.num_rows} rows" + (", filtered" if features.filters else "")
    return f"{bucket.num_tokens} tokens, {bucket.num_rows} rows, {bucket.table_width} blocks"

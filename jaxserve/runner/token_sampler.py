"""Runs the sampler after a step, for the requests that need more than the most likely token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxserve.arrays import Leaf
from jaxserve.config import LogprobsMode
from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.buckets import sampler_sizes
from jaxserve.runner.declared_stages import NO_STAGES, DeclaredStages, StageWork
from jaxserve.runner.jit import CompilationLog, Packed, Program, pack
from jaxserve.runner.sampling_batch import (
    SamplingBatchBuilder,
    SamplingNeeds,
    fill_masks,
    only_penalties,
    without_penalties,
)
from jaxserve.sampling.inputs import Filters, SamplingInputs
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs, logprobs_size
from jaxserve.sampling.sampler import filtered_logits, process_logits, sample
from jaxserve.sampling.stages import Logits

LastTokens = Int32[Array, " engine_rows"]

NO_REQUESTS = StepPlan(step_id=-1, scheduled=())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The results of the sampler for one step.

    Attributes:
      tokens: i32[A], a token for each row in `SamplingNeeds.to_sample`, then padding; or None.
      logprobs: for the rows in `SamplingNeeds.to_score`, then padding; or None.
    """

    tokens: Int32[Leaf, " a"] | None
    logprobs: Logprobs | None


@dataclasses.dataclass(frozen=True)
class SamplingWork:
    """The sampler's part of a step whose forward pass has been started.

    Attributes:
      plan: the plan of the step.
      needs: the work of the sampler for the plan.
      logits: f32[A, V], the rows to sample, or None.
      inputs: the parameters of those rows, as numpy arrays, or None. The masks of constraints are
        not filled yet.
      raw: f32[B, V], the rows to score as the model computed them, or None.
      stages: the inputs of the declared stages for the rows to sample.
    """

    plan: StepPlan
    needs: SamplingNeeds
    logits: Logits | None
    inputs: SamplingInputs | None
    raw: Float32[Array, "b vocab"] | None
    stages: StageWork = NO_STAGES


class TokenSampler:
    """Samples tokens from logits, and computes their log probabilities.

    The rows that need the sampler are gathered from the logits of a step, so that the other rows
    cost nothing. The gathered rows go through a few programs that know nothing of the step:

        logits [R, V] -> take -> process (masks) -> process (token lists) -> sample -> tokens
        logits [R, V] -> take -> score, with the tokens -> log probabilities

    Each program is compiled for a few numbers of rows, and runs only if a row needs it. Declared
    stages have their own programs: logits processors run before penalties, filters before `sample`.

    Args:
      num_rows: S, the engine's rows.
      vocab_size: V.
      logprobs_mode: which numbers are reported as log probabilities; see `LogprobsConfig`.
      log: receives the compilations.
      stages: the declared stages; None: there are none.
      sharding: the devices of logits and last tokens; None: the default device of jax.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode,
        log: CompilationLog,
        stages: DeclaredStages | None = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._sharding = sharding
        self._vocab_size = vocab_size
        self._sizes = sampler_sizes(num_rows)
        self._scores_processed = logprobs_mode.startswith("processed")
        self._batch = SamplingBatchBuilder(num_rows=num_rows, vocab_size=vocab_size)
        self._stages = stages or DeclaredStages((), num_rows=num_rows, max_model_len=1, log=log)

        @jax.jit
        def take_step(
            logits: Float32[Array, "rows vocab"], indices: Int32[Array, " a"]
        ) -> Float32[Array, "a vocab"]:
            return logits.at[indices].get(mode="clip")

        @functools.partial(jax.jit, donate_argnums=0)
        def process_step(logits: Logits, last_tokens: LastTokens, packed: Packed) -> Logits:
            return process_logits(logits, last_tokens, packed.unpack())

        @functools.partial(jax.jit, donate_argnums=1)
        def sample_step(
            logits: Logits, last_tokens: LastTokens, packed: Packed
        ) -> tuple[LastTokens, Int32[Array, " rows"], Logits | None]:
            inputs: SamplingInputs = packed.unpack()
            tokens, drawn_from = sample(logits, inputs)
            last_tokens = last_tokens.at[inputs.kept_in_row].set(tokens, mode="drop")
            if not self._scores_processed:
                return last_tokens, tokens, None
            return last_tokens, tokens, filtered_logits(drawn_from, tokens, inputs)

        @functools.partial(jax.jit, static_argnames="k")
        def score_step(
            logits: Logits, last_tokens: LastTokens, engine_rows: Int32[Array, " rows"], *, k: int
        ) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            return compute_logprobs(logits, last_tokens[engine_rows], k, as_logits=as_logits)

        self._take = Program("gathering rows of logits", take_step, log)
        self._process = Program("processing logits", process_step, log)
        self._sample = Program("sampling tokens", sample_step, log)
        self._score = Program("log probabilities", score_step, log)

    def admit(self, part: ScheduledRequest) -> None:
        """Stores the parameters of a new request in its row."""
        self._batch.admit(part)
        self._stages.admit(part)

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """Returns the work of the sampler for a plan."""
        needs = self._batch.needs(plan)
        # With a processed logprobs_mode, scored rows must pass every stage too.
        to_process = needs.to_score if self._scores_processed else ()
        users = self._stages.users(plan)
        if not to_process and not users:
            return needs
        to_sample = tuple(sorted({*needs.to_sample, *to_process, *users}))
        return dataclasses.replace(needs, to_sample=to_sample)

    def gather(
        self, plan: StepPlan, needs: SamplingNeeds, logits: Float32[Array, "rows vocab"]
    ) -> SamplingWork:
        """Gathers the rows that need the sampler from the logits of a step, and builds its inputs.

        It does not wait for the device.
        """
        raw = taken = inputs = None
        stages = NO_STAGES
        if needs.to_sample:
            taken = self._rows(logits, needs.to_sample)
            inputs = self._batch.build(plan, needs, len(taken))
            stages = self._stages.gather(plan, needs.to_sample, inputs)
        if needs.to_score and not self._scores_processed:
            raw = self._rows(logits, needs.to_score)
        return SamplingWork(plan, needs, taken, inputs, raw, stages)

    def finish(self, work: SamplingWork, last_tokens: LastTokens) -> tuple[LastTokens, Sampled]:
        """Starts the rest of the sampler's work, without waiting for the device.

        Call it when all constraints have accepted the tokens of earlier steps.

        Args:
          work: returned by `gather`.
          last_tokens: i32[S], the last token of each engine row; donated.

        Returns:
          (the last tokens including the new ones, the results).
        """
        plan, needs, tokens, to_score = work.plan, work.needs, None, work.raw
        if work.inputs is not None:
            fill_masks(plan, needs, work.inputs)
            last_tokens, tokens, processed = self._sampled(
                work.logits, last_tokens, work.inputs, needs, work.stages
            )
            if needs.to_score and processed is not None:
                row_of = {index: row for row, index in enumerate(needs.to_sample)}
                to_score = self._rows(processed, [row_of[index] for index in needs.to_score])
        if to_score is None:
            return last_tokens, Sampled(tokens, None)
        engine_rows = [plan.scheduled[index].row for index in needs.to_score]
        logprobs = self._scores(to_score, last_tokens, engine_rows, needs.num_logprobs)
        return last_tokens, Sampled(tokens, logprobs)

    def warm_ups(self, step_sizes: Iterable[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each common program and a function that compiles it by running it.

        ``step_sizes``: the numbers of rows of logits that a step may have.
        """
        for step_size in sorted({*step_sizes, *(self._sizes if self._scores_processed else ())}):
            for size in self._sizes:
                name = f"{size} of {step_size} rows"
                yield name, functools.partial(self._warm_up_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self._sizes:
            name = f"masks of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=True)
            name = f"token lists of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=False)
            for filters in (Filters.NONE, Filters.SMALL_TOP_K):
                name = f"sampling of {size} rows, {filters.value}"
                yield name, functools.partial(self._warm_up_sampling, size, filters)
            name = f"log probabilities of {size} rows"
            yield name, functools.partial(self._warm_up_scores, size)
        yield from self._stages.warm_ups(self._sizes, self._no_logits, self._no_inputs)

    def _rows(
        self, logits: Float32[Array, "rows vocab"], indices: Sequence[int]
    ) -> Float32[Array, "a vocab"]:
        """Returns these rows of f32[R, V], padded to one of the sampler's sizes."""
        size = next(size for size in self._sizes if size >= len(indices))
        padded = np.zeros(size, np.int32)
        padded[: len(indices)] = indices
        return self._take(logits, padded, shapes=f"{size} of {len(logits)} rows")

    def _sampled(
        self,
        logits: Any,
        last_tokens: LastTokens,
        inputs: SamplingInputs,
        needs: SamplingNeeds,
        stages: StageWork = NO_STAGES,
    ) -> tuple[LastTokens, Int32[Array, " rows"], Logits | None]:
        """Returns the last tokens, the sampled tokens, and the logits after the last stage.

        The logits are None unless a processed logprobs_mode needs them.
        """
        if needs.has_masks:
            logits = self._masked(logits, last_tokens, inputs)
        if stages.processors:
            logits = self._processed(logits, last_tokens, inputs, needs, stages)
        elif needs.has_token_lists:
            logits = self._listed(logits, last_tokens, inputs)
        if stages.filters:
            logits, inputs = self._stages.filter(logits, last_tokens, stages, inputs)
        parameters = dataclasses.replace(inputs, mask=None, biased=None, blocked=None, seen=None)
        shapes = f"{len(logits)} rows, {inputs.filters.value}"
        return self._sample(logits, last_tokens, pack(parameters), shapes=shapes)

    def _masked(self, logits: Logits, last_tokens: LastTokens, inputs: SamplingInputs) -> Logits:
        """Applies only the masks."""
        masks = dataclasses.replace(
            inputs, biased=None, blocked=None, seen=None, filters=Filters.NONE
        )
        shapes = f"{len(logits)} rows, masks"
        return self._process(logits, last_tokens, pack(masks), shapes=shapes)

    def _listed(self, logits: Logits, last_tokens: LastTokens, inputs: SamplingInputs) -> Logits:
        """Applies only the token lists: blocked tokens, biases, penalties."""
        assert inputs.seen is not None
        lists = dataclasses.replace(inputs, mask=None, filters=Filters.NONE)
        shapes = f"{len(logits)} rows, lists of {len(inputs.seen.ids)} tokens"
        return self._process(logits, last_tokens, pack(lists), shapes=shapes)

    def _processed(
        self,
        logits: Any,
        last_tokens: LastTokens,
        inputs: SamplingInputs,
        needs: SamplingNeeds,
        stages: StageWork,
    ) -> Logits:
        """Applies the declared logits processors between the token lists: before penalties."""
        if needs.has_token_lists:
            logits = self._listed(logits, last_tokens, without_penalties(inputs))
        logits = self._stages.process(logits, last_tokens, stages)
        if needs.has_token_lists:
            logits = self._listed(logits, last_tokens, only_penalties(inputs))
        return logits

    def _scores(
        self, logits: Logits, last_tokens: LastTokens, rows: Sequence[int], k: int
    ) -> Logprobs:
        """Scores the last tokens of these engine rows."""
        engine_rows = np.zeros(len(logits), np.int32)
        engine_rows[: len(rows)] = rows
        shapes = f"{len(logits)} rows, {k} most likely tokens"
        return self._score(logits, last_tokens, engine_rows, k=k, shapes=shapes)

    def _warm_up_rows(self, step_size: int, size: int) -> Any:
        return self._rows(self._no_logits(step_size), [0] * size)

    def _warm_up_scores(self, size: int) -> Any:
        k = logprobs_size(0, self._vocab_size)
        return self._scores(self._no_logits(size), self._no_tokens(), [0] * size, k)

    def _warm_up_processing(self, size: int, *, has_masks: bool) -> Any:
        inputs = self._no_inputs(size, has_masks=has_masks, has_token_lists=not has_masks)
        process = self._masked if has_masks else self._listed
        return process(self._no_logits(size), self._no_tokens(), inputs)

    def _warm_up_sampling(self, size: int, filters: Filters) -> Any:
        needs = SamplingNeeds(filters=filters)
        inputs = self._no_inputs(size, filters=filters)
        return self._sampled(self._no_logits(size), self._no_tokens(), inputs, needs)

    def _no_inputs(self, num_rows: int, **needs: Any) -> SamplingInputs:
        return self._batch.build(NO_REQUESTS, SamplingNeeds(**needs), num_rows)

    def _no_logits(self, num_rows: int) -> Logits:
        return jnp.zeros((num_rows, self._vocab_size), device=self._sharding)

    def _no_tokens(self) -> LastTokens:
        return jnp.zeros(self.num_rows, jnp.int32, device=self._sharding)

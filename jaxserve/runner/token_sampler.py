"""Runs the sampler after a step, for the requests that need more than the most likely token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxserve.config import LogprobsMode
from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.buckets import sampler_sizes
from jaxserve.runner.declared_stages import NO_STAGES, DeclaredStages, StageWork
from jaxserve.runner.jit import CompilationLog, Packed, Program, pack
from jaxserve.runner.sampling_batch import (
    SamplingBatchBuilder,
    SamplingNeeds,
    fill_masks,
)
from jaxserve.runner.sampling_work import Sampled, SamplingWork, Verify
from jaxserve.sampling.inputs import Filters, LastTokens, SamplingInputs
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs
from jaxserve.sampling.sampler import filtered_logits, process_logits, sample
from jaxserve.sampling.stages import Logits


class TokenSampler:
    """Samples tokens from logits, and computes their log probabilities.

    The rows that need the sampler are gathered from the logits of a step, so that the other rows
    cost nothing. The gathered rows go through a few programs that know nothing of the step:

        logits [R, V] -> take -> process (masks) -> process (token lists) -> sample -> tokens
        logits [R, V] -> take -> score, with the tokens -> log probabilities

    If the plan speculates, the positions come from the device, and the drafts are verified between
    sampling and scoring.

    Each program is compiled for a few numbers of rows, and runs only if a row needs it. Declared
    stages have their own programs: logits processors run before penalties, filters before `sample`.

    Args:
      num_rows: S, the engine's rows.
      vocab_size: V.
      logprobs_mode: which numbers are reported as log probabilities; see `LogprobsConfig`.
      log: receives the compilations.
      max_num_rows: the most rows of a step; S if None.
      stages: the declared stages; None: there are none.
      sharding: the devices of logits and last tokens; None: the default device of jax.

    Raises:
      ConfigError: a declared stage fails on a number of rows; see `DeclaredStages.check`.

    Attributes:
      num_rows, vocab_size: as above.
      sizes: the numbers of rows that the programs are compiled for, ascending.
      scores_processed: whether log probabilities are those after the last stage.
      batch: builds the inputs.
      stages, sharding: as above.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode,
        log: CompilationLog,
        max_num_rows: int | None = None,
        stages: DeclaredStages | None = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.sharding = sharding
        self.vocab_size = vocab_size
        self.sizes = sampler_sizes(max_num_rows or num_rows)
        self.scores_processed = logprobs_mode.startswith("processed")
        self.batch = SamplingBatchBuilder(num_rows=num_rows, vocab_size=vocab_size)
        self.stages = stages or DeclaredStages((), max_model_len=1, log=log)
        self.stages.check(self.sizes, vocab_size)

        @jax.jit
        def take_step(
            logits: Float32[Array, "rows vocab"], indices: Int32[Array, " a"]
        ) -> Float32[Array, "a vocab"]:
            return logits.at[indices].get(mode="clip")

        @jax.jit
        def take_placed_step(
            logits: Float32[Array, "rows vocab"],
            positions: Int32[Array, " rows"],
            indices: Int32[Array, " a"],
        ) -> tuple[Float32[Array, "a vocab"], Int32[Array, " a"]]:
            return take_step(logits, indices), positions[indices]

        @functools.partial(jax.jit, donate_argnums=0)
        def process_step(logits: Logits, last_tokens: LastTokens, packed: Packed) -> Logits:
            return process_logits(logits, last_tokens, packed.unpack())

        @functools.partial(jax.jit, donate_argnums=1)
        def sample_step(
            logits: Logits,
            last_tokens: LastTokens,
            packed: Packed,
            positions: Int32[Array, " rows"] | None,
        ) -> tuple[LastTokens, Int32[Array, " rows"], Logits | None]:
            inputs: SamplingInputs = packed.unpack()
            if positions is not None:
                inputs = dataclasses.replace(inputs, positions=positions)
            tokens, drawn_from = sample(logits, inputs)
            last_tokens = last_tokens.at[inputs.kept_in_row].set(tokens, mode="drop")
            if not self.scores_processed:
                return last_tokens, tokens, None
            return last_tokens, tokens, filtered_logits(drawn_from, tokens, inputs)

        @functools.partial(jax.jit, static_argnames="k")
        def score_step(
            logits: Logits, tokens: Int32[Array, " n"], indices: Int32[Array, " rows"], *, k: int
        ) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            return compute_logprobs(logits, tokens[indices], k, as_logits=as_logits)

        self._take = Program("gathering rows of logits", take_step, log)
        self._take_placed = Program(
            "gathering rows of logits, with positions", take_placed_step, log
        )
        self._process = Program("processing logits", process_step, log)
        self._sample = Program("sampling tokens", sample_step, log)
        self._score = Program("log probabilities", score_step, log)

    def admit(self, part: ScheduledRequest) -> None:
        """Stores the parameters of a new request in its row."""
        self.batch.admit(part)
        self.stages.admit(part)

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """Returns the work of the sampler for a plan."""
        needs = self.batch.needs(plan)
        # With a processed logprobs_mode, scored rows must pass every stage too.
        to_process = needs.to_score if self.scores_processed else ()
        users = self.stages.users(plan)
        if not to_process and not users:
            return needs
        to_sample = tuple(sorted({*needs.to_sample, *to_process, *users}))
        return dataclasses.replace(needs, to_sample=to_sample)

    def gather(
        self,
        plan: StepPlan,
        needs: SamplingNeeds,
        logits: Float32[Array, "rows vocab"],
        positions: Int32[Array, " rows"] | None = None,
    ) -> SamplingWork:
        """Gathers the rows that need the sampler from the logits of a step, and builds its inputs.

        ``positions``: i32[R], where each row samples, if the plan speculates. It does not wait for
        the device.
        """
        raw = taken = taken_positions = inputs = None
        stages = NO_STAGES
        if needs.to_sample:
            if positions is None:
                taken = self.rows(logits, needs.to_sample)
            else:
                taken, taken_positions = self.placed_rows(logits, positions, needs.to_sample)
            inputs = self.batch.build(plan, needs, len(taken))
            stages = self.stages.gather(plan, needs.to_sample, inputs)
        if needs.to_score and not self.scores_processed:
            raw = self.rows(logits, needs.to_score)
        return SamplingWork(plan, needs, taken, inputs, raw, stages, taken_positions)

    def finish(
        self, work: SamplingWork, last_tokens: LastTokens, verify: Verify | None = None
    ) -> tuple[LastTokens, Sampled]:
        """Starts the rest of the sampler's work, without waiting for the device.

        Call it when all constraints have accepted the tokens of earlier steps.

        Args:
          work: returned by `gather`.
          last_tokens: i32[S], the last token of each engine row; donated.
          verify: verifies drafts, if the plan speculates.

        Returns:
          (the last tokens including the new ones, the results).
        """
        needs, tokens, to_score, verified = work.needs, None, work.raw, None
        if work.inputs is not None:
            assert work.logits is not None
            fill_masks(work.plan, needs, work.inputs)
            last_tokens, tokens, processed = self.sampled(
                work.logits, last_tokens, work.inputs, needs, work.stages, work.positions
            )
            if needs.to_score and processed is not None:
                row_of = {index: row for row, index in enumerate(needs.to_sample)}
                to_score = self.rows(processed, [row_of[index] for index in needs.to_score])
        if verify is not None:
            last_tokens, verified = verify(tokens, needs.to_sample, last_tokens)
        if to_score is None:
            return last_tokens, Sampled(tokens, None, verified)
        if verified is None:
            rows = work.plan.scheduled
            drawn, indices = last_tokens, [rows[index].row for index in needs.to_score]
        else:
            drawn, indices = verified.tokens, needs.to_score
        logprobs = self.scores(to_score, drawn, indices, needs.num_logprobs)
        return last_tokens, Sampled(tokens, logprobs, verified)

    def rows(
        self, logits: Float32[Array, "rows vocab"], indices: Sequence[int]
    ) -> Float32[Array, "a vocab"]:
        """Returns these rows of f32[R, V], padded to one of the sampler's sizes."""
        padded = self._padded(indices)
        return self._take(logits, padded, shapes=f"{len(padded)} of {len(logits)} rows")

    def placed_rows(
        self,
        logits: Float32[Array, "rows vocab"],
        positions: Int32[Array, " rows"],
        indices: Sequence[int],
    ) -> tuple[Float32[Array, "a vocab"], Int32[Array, " a"]]:
        """Returns `rows` of f32[R, V], and the same rows of the positions i32[R]."""
        padded = self._padded(indices)
        shapes = f"{len(padded)} of {len(logits)} rows"
        return self._take_placed(logits, positions, padded, shapes=shapes)

    def _padded(self, indices: Sequence[int]) -> Int32[np.ndarray, " a"]:
        """Returns the indices, padded with 0 to one of the sampler's sizes."""
        size = next(size for size in self.sizes if size >= len(indices))
        padded = np.zeros(size, np.int32)
        padded[: len(indices)] = indices
        return padded

    def sampled(
        self,
        logits: Logits,
        last_tokens: LastTokens,
        inputs: SamplingInputs,
        needs: SamplingNeeds,
        stages: StageWork = NO_STAGES,
        positions: Int32[Array, " rows"] | None = None,
    ) -> tuple[LastTokens, Int32[Array, " rows"], Logits | None]:
        """Returns the last tokens, the sampled tokens, and the logits after the last stage.

        The logits are None unless a processed logprobs_mode needs them.
        """
        if needs.has_masks:
            logits = self.masked(logits, last_tokens, inputs)
        if stages.processors:
            logits = self._processed(logits, last_tokens, inputs, needs, stages)
        elif needs.has_token_lists:
            logits = self.listed(logits, last_tokens, inputs)
        if stages.filters:
            logits, inputs = self.stages.filter(logits, last_tokens, stages, inputs)
        shapes = f"{len(logits)} rows, {inputs.filters.value}"
        if positions is not None:
            shapes += ", positions from the device"
        packed = pack(inputs.without_tokens())
        return self._sample(logits, last_tokens, packed, positions, shapes=shapes)

    def masked(self, logits: Logits, last_tokens: LastTokens, inputs: SamplingInputs) -> Logits:
        """Applies only the masks."""
        masks = dataclasses.replace(
            inputs, biased=None, blocked=None, seen=None, filters=Filters.NONE
        )
        shapes = f"{len(logits)} rows, masks"
        return self._process(logits, last_tokens, pack(masks), shapes=shapes)

    def listed(self, logits: Logits, last_tokens: LastTokens, inputs: SamplingInputs) -> Logits:
        """Applies only the token lists: blocked tokens, biases, penalties."""
        assert inputs.seen is not None
        lists = dataclasses.replace(inputs, mask=None, filters=Filters.NONE)
        shapes = f"{len(logits)} rows, lists of {len(inputs.seen.ids)} tokens"
        return self._process(logits, last_tokens, pack(lists), shapes=shapes)

    def _processed(
        self,
        logits: Logits,
        last_tokens: LastTokens,
        inputs: SamplingInputs,
        needs: SamplingNeeds,
        stages: StageWork,
    ) -> Logits:
        """Applies the declared logits processors between the token lists: before penalties."""
        if needs.has_token_lists:
            logits = self.listed(logits, last_tokens, inputs.without_penalties())
        logits = self.stages.process(logits, last_tokens, stages)
        if needs.has_token_lists:
            logits = self.listed(logits, last_tokens, inputs.only_penalties())
        return logits

    def scores(
        self, logits: Logits, tokens: Int32[Array, " n"], indices: Sequence[int], k: int
    ) -> Logprobs:
        """Scores the tokens i32[N] at these indices."""
        padded = np.zeros(len(logits), np.int32)
        padded[: len(indices)] = indices
        shapes = f"{len(logits)} rows, {k} most likely tokens"
        return self._score(logits, tokens, padded, k=k, shapes=shapes)

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
from jaxserve.runner.draft_rows import Verified
from jaxserve.runner.jit import CompilationLog, Packed, Program, pack
from jaxserve.runner.sampling_batch import SamplingBatchBuilder, SamplingNeeds, fill_masks
from jaxserve.sampling.inputs import Filters, SamplingInputs
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs, logprobs_size
from jaxserve.sampling.sampler import filtered_logits, process_logits, sample
from jaxserve.sampling.stages import Logits

LastTokens = Int32[Array, " engine_rows"]

Verify = Callable[
    [Int32[Array, " a"] | None, Sequence[int], LastTokens], tuple[LastTokens, Verified]
]
"""Verifies drafts: (sampled tokens i32[A], the rows they are for, last tokens) -> results."""

NO_REQUESTS = StepPlan(step_id=-1, scheduled=())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The results of the sampler for one step.

    Attributes:
      tokens: i32[A], a token for each row in `SamplingNeeds.to_sample`, then padding; or None.
      logprobs: for the rows in `SamplingNeeds.to_score`, then padding; or None.
      verified: the outcome of drafts, if the plan speculates, else None.
    """

    tokens: Int32[Leaf, " a"] | None
    logprobs: Logprobs | None
    verified: Verified | None = None


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
      positions: i32[A], the position of the token that each row of ``logits`` samples; None: the
        host knows all of them, and they are in ``inputs``.
    """

    plan: StepPlan
    needs: SamplingNeeds
    logits: Logits | None
    inputs: SamplingInputs | None
    raw: Float32[Array, "b vocab"] | None
    positions: Int32[Array, " a"] | None = None


class TokenSampler:
    """Samples tokens from logits, and computes their log probabilities.

    The rows that need the sampler are gathered from the logits of a step, so that the other rows
    cost nothing. The gathered rows go through a few programs that know nothing of the step:

        logits [R, V] -> take -> process (masks) -> process (token lists) -> sample -> tokens
        logits [R, V] -> take -> score, with the tokens -> log probabilities

    If the plan speculates, the positions come from the device, and the drafts are verified between
    sampling and scoring.

    Each program is compiled for a few numbers of rows, and runs only if a row needs it.

    Args:
      num_rows: S, the engine's rows.
      max_num_rows: the most rows of a step.
      vocab_size: V.
      logprobs_mode: which numbers are reported as log probabilities; see `LogprobsConfig`.
      log: receives the compilations.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode,
        log: CompilationLog,
        max_num_rows: int | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._vocab_size = vocab_size
        self.sizes = sampler_sizes(max_num_rows or num_rows)
        self._scores_processed = logprobs_mode.startswith("processed")
        self._batch = SamplingBatchBuilder(num_rows=num_rows, vocab_size=vocab_size)

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
            if not self._scores_processed:
                return last_tokens, tokens, None
            return last_tokens, tokens, filtered_logits(drawn_from, tokens, inputs)

        @functools.partial(jax.jit, static_argnames="k")
        def score_step(
            logits: Logits, tokens: Int32[Array, " n"], indices: Int32[Array, " rows"], *, k: int
        ) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            return compute_logprobs(logits, tokens[indices], k, as_logits=as_logits)

        self._take = Program("gathering rows of logits", take_step, log)
        self._take_placed = Program("gathering rows of logits, with positions", take_placed_step, log)
        self._process = Program("processing logits", process_step, log)
        self._sample = Program("sampling tokens", sample_step, log)
        self._score = Program("log probabilities", score_step, log)

    def admit(self, part: ScheduledRequest) -> None:
        """Stores the parameters of a new request in its row."""
        self._batch.admit(part)

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """Returns the work of the sampler for a plan."""
        needs = self._batch.needs(plan)
        if not self._scores_processed or not needs.to_score:
            return needs
        # With a processed logprobs_mode, scored rows must pass every stage too.
        to_sample = tuple(sorted({*needs.to_sample, *needs.to_score}))
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
        if needs.to_sample:
            if positions is None:
                taken = self._rows(logits, needs.to_sample)
            else:
                taken, taken_positions = self._placed_rows(logits, positions, needs.to_sample)
            inputs = self._batch.build(plan, needs, len(taken))
        if needs.to_score and not self._scores_processed:
            raw = self._rows(logits, needs.to_score)
        return SamplingWork(plan, needs, taken, inputs, raw, taken_positions)

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
            fill_masks(work.plan, needs, work.inputs)
            last_tokens, tokens, processed = self._sampled(
                work.logits, last_tokens, work.inputs, needs, work.positions
            )
            if needs.to_score and processed is not None:
                row_of = {index: row for row, index in enumerate(needs.to_sample)}
                to_score = self._rows(processed, [row_of[index] for index in needs.to_score])
        if verify is not None:
            last_tokens, verified = verify(tokens, needs.to_sample, last_tokens)
        if to_score is None:
            return last_tokens, Sampled(tokens, None, verified)
        if verified is None:
            rows = work.plan.scheduled
            drawn, indices = last_tokens, [rows[index].row for index in needs.to_score]
        else:
            drawn, indices = verified.tokens, needs.to_score
        logprobs = self._scores(to_score, drawn, indices, needs.num_logprobs)
        return last_tokens, Sampled(tokens, logprobs, verified)

    def warm_ups(
        self, step_sizes: Iterable[int], *, num_drawn: int | None = None
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each common program and a function that compiles it by running it.

        Args:
          step_sizes: the numbers of rows of logits that a step may have.
          num_drawn: the length of `Verified.tokens`, if the engine speculates.
        """
        step_sizes = set(step_sizes)
        if num_drawn is not None:
            yield from self._warm_ups_of_drafts(step_sizes, num_drawn)
        for step_size in sorted({*step_sizes, *(self.sizes if self._scores_processed else ())}):
            for size in self.sizes:
                name = f"{size} of {step_size} rows"
                yield name, functools.partial(self._warm_up_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self.sizes:
            name = f"masks of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=True)
            name = f"token lists of {size} rows"
            yield name, functools.partial(self._warm_up_processing, size, has_masks=False)
            for filters in (Filters.NONE, Filters.SMALL_TOP_K):
                name = f"sampling of {size} rows, {filters.value}"
                yield name, functools.partial(self._warm_up_sampling, size, filters)
            name = f"log probabilities of {size} rows"
            yield name, functools.partial(self._warm_up_scores, size, self.num_rows)

    def _warm_ups_of_drafts(
        self, step_sizes: Iterable[int], num_drawn: int
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the programs that only plans with drafts run; see `warm_ups`."""
        for step_size in sorted(step_sizes):
            for size in self.sizes:
                name = f"{size} of {step_size} rows, with positions"
                yield name, functools.partial(self._warm_up_placed_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self.sizes:
            for filters in (Filters.NONE, Filters.SMALL_TOP_K):
                name = f"sampling of {size} rows, {filters.value}, positions from the device"
                positions = jnp.zeros(size, jnp.int32)
                yield name, functools.partial(self._warm_up_sampling, size, filters, positions)
            if num_drawn != self.num_rows:
                name = f"log probabilities of {size} rows, of {num_drawn} tokens"
                yield name, functools.partial(self._warm_up_scores, size, num_drawn)

    def _rows(
        self, logits: Float32[Array, "rows vocab"], indices: Sequence[int]
    ) -> Float32[Array, "a vocab"]:
        """Returns these rows of f32[R, V], padded to one of the sampler's sizes."""
        padded = self._padded(indices)
        return self._take(logits, padded, shapes=f"{len(padded)} of {len(logits)} rows")

    def _placed_rows(
        self,
        logits: Float32[Array, "rows vocab"],
        positions: Int32[Array, " rows"],
        indices: Sequence[int],
    ) -> tuple[Float32[Array, "a vocab"], Int32[Array, " a"]]:
        """Returns `_rows` of f32[R, V], and of the positions i32[R]."""
        padded = self._padded(indices)
        shapes = f"{len(padded)} of {len(logits)} rows"
        return self._take_placed(logits, positions, padded, shapes=shapes)

    def _padded(self, indices: Sequence[int]) -> Int32[np.ndarray, " a"]:
        """Returns the indices, padded with 0 to one of the sampler's sizes."""
        size = next(size for size in self.sizes if size >= len(indices))
        padded = np.zeros(size, np.int32)
        padded[: len(indices)] = indices
        return padded

    def _sampled(
        self,
        logits: Any,
        last_tokens: LastTokens,
        inputs: SamplingInputs,
        needs: SamplingNeeds,
        positions: Int32[Array, " rows"] | None,
    ) -> tuple[LastTokens, Int32[Array, " rows"], Logits | None]:
        """Returns the last tokens, the sampled tokens, and the logits after the last stage.

        The logits are None unless a processed logprobs_mode needs them.
        """
        if needs.has_masks:
            logits = self._masked(logits, last_tokens, inputs)
        if needs.has_token_lists:
            logits = self._listed(logits, last_tokens, inputs)
        parameters = dataclasses.replace(inputs, mask=None, biased=None, blocked=None, seen=None)
        shapes = f"{len(logits)} rows, {inputs.filters.value}"
        if positions is not None:
            shapes += ", positions from the device"
        return self._sample(logits, last_tokens, pack(parameters), positions, shapes=shapes)

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

    def _scores(
        self, logits: Logits, tokens: Int32[Array, " n"], indices: Sequence[int], k: int
    ) -> Logprobs:
        """Scores the tokens i32[N] at these indices."""
        padded = np.zeros(len(logits), np.int32)
        padded[: len(indices)] = indices
        shapes = f"{len(logits)} rows, {k} most likely tokens"
        return self._score(logits, tokens, padded, k=k, shapes=shapes)

    def _warm_up_rows(self, step_size: int, size: int) -> Any:
        return self._rows(self._no_logits(step_size), [0] * size)

    def _warm_up_placed_rows(self, step_size: int, size: int) -> Any:
        positions = jnp.zeros(step_size, jnp.int32)
        return self._placed_rows(self._no_logits(step_size), positions, [0] * size)

    def _warm_up_scores(self, size: int, num_drawn: int) -> Any:
        k, tokens = logprobs_size(0, self._vocab_size), jnp.zeros(num_drawn, jnp.int32)
        return self._scores(self._no_logits(size), tokens, [0] * size, k)

    def _warm_up_processing(self, size: int, *, has_masks: bool) -> Any:
        needs = SamplingNeeds(has_masks=has_masks, has_token_lists=not has_masks)
        inputs = self._batch.build(NO_REQUESTS, needs, size)
        process = self._masked if has_masks else self._listed
        return process(self._no_logits(size), self._no_tokens(), inputs)

    def _warm_up_sampling(
        self, size: int, filters: Filters, positions: Int32[Array, " rows"] | None = None
    ) -> Any:
        needs = SamplingNeeds(filters=filters)
        inputs = self._batch.build(NO_REQUESTS, needs, size)
        return self._sampled(
            self._no_logits(size), self._no_tokens(), inputs, needs, positions
        )

    def _no_logits(self, num_rows: int) -> Logits:
        return jnp.zeros((num_rows, self._vocab_size))

    def _no_tokens(self) -> LastTokens:
        return jnp.zeros(self.num_rows, jnp.int32)

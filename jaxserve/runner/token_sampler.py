"""Runs the sampler after a step, for the requests that ask for more than the most likely token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.arrays import Leaf
from jaxserve.config import LogprobsMode
from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.buckets import sampler_sizes
from jaxserve.runner.packing import Packed, pack
from jaxserve.runner.programs import CompilationLog, Program
from jaxserve.runner.sampling_batch import SamplingBatchBuilder, SamplingNeeds, fill_masks
from jaxserve.sampling.logprobs import Logprobs, compute_logprobs, logprobs_size
from jaxserve.sampling.rows import SamplingFeatures, SamplingRows
from jaxserve.sampling.sampler import choose, edit, processed

MASKED = SamplingFeatures(masked=True)
EDITED = SamplingFeatures(biased=True, blocked=True, penalties=True)
UNFILTERED = SamplingFeatures(random=True)
FILTERED = SamplingFeatures(random=True, filters=True)
LARGE_TOP_K = SamplingFeatures(random=True, filters=True, large_top_k=True)

NO_REQUESTS = StepPlan(step_id=-1, scheduled=())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What was sampled: tokens i32[A] of the rows whose tokens were chosen, and log probabilities
    of those that asked; None if there are none.
    """

    tokens: Leaf | None
    logprobs: Logprobs | None


class TokenSampler:
    """Chooses tokens and scores them.

    The rows that ask are gathered from the logits of a step, so that the rest costs nothing, and
    then go through a few programs that know nothing of the step:

        logits [R, V] -> take -> edit (mask) -> edit (lists) -> choose -> tokens
        logits [R, V] -> take -> score, with the tokens -> log probabilities

    each compiled for a few numbers of rows, and run only if a row needs it.

    Args:
      num_rows: S, the engine's rows.
      vocab_size: V.
      logprobs_mode: which numbers log probabilities are.
      log: is told of compilations.
    """

    def __init__(
        self, *, num_rows: int, vocab_size: int, logprobs_mode: LogprobsMode, log: CompilationLog
    ) -> None:
        self.num_rows = num_rows
        self._vocab_size = vocab_size
        self._sizes = sampler_sizes(num_rows)
        self._scores_processed = logprobs_mode.startswith("processed")
        self._batch = SamplingBatchBuilder(num_rows=num_rows, vocab_size=vocab_size)

        @jax.jit
        def take_step(logits: jax.Array, rows: jax.Array) -> jax.Array:
            return logits.at[rows].get(mode="clip")

        @functools.partial(jax.jit, static_argnames="features", donate_argnums=0)
        def edit_step(
            logits: jax.Array, last_tokens: jax.Array, packed: Packed, *, features: SamplingFeatures
        ) -> jax.Array:
            return edit(logits, last_tokens, packed.unpack(), features=features)

        @functools.partial(jax.jit, static_argnames="features", donate_argnums=1)
        def choose_step(
            logits: jax.Array, last_tokens: jax.Array, packed: Packed, *, features: SamplingFeatures
        ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
            rows: SamplingRows = packed.unpack()
            tokens, changed = choose(logits, rows, features=features)
            last_tokens = last_tokens.at[rows.targets].set(tokens, mode="drop")
            if not self._scores_processed:
                return last_tokens, tokens, None
            return last_tokens, tokens, processed(changed, tokens, rows, features=features)

        @functools.partial(jax.jit, static_argnames="k")
        def score_step(
            logits: jax.Array, last_tokens: jax.Array, rows: jax.Array, *, k: int
        ) -> Logprobs:
            as_logits = logprobs_mode.endswith("logits")
            return compute_logprobs(logits, last_tokens[rows], k, as_logits=as_logits)

        self._take = Program("gathering rows of logits", take_step, log)
        self._edit = Program("editing logits", edit_step, log)
        self._choose = Program("choosing tokens", choose_step, log)
        self._score = Program("log probabilities", score_step, log)

    def admit(self, part: ScheduledRequest) -> None:
        """Forgets what the row of the request held and takes in its parameters."""
        self._batch.admit(part)

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """What the requests of a plan ask for."""
        needs = self._batch.needs(plan)
        if not self._scores_processed or not needs.scored:
            return needs
        # Those whose logits are to be seen as they are after the last stage go through all stages.
        chosen = tuple(sorted({*needs.chosen, *needs.scored}))
        return dataclasses.replace(needs, chosen=chosen)

    def start(
        self, plan: StepPlan, needs: SamplingNeeds, logits: jax.Array
    ) -> Callable[[jax.Array], tuple[jax.Array, Sampled]]:
        """Gathers rows of the logits f32[R, V] of a step, and builds the inputs for them.

        Returns:
          What starts the rest, without waiting for it: from the last tokens i32[S] of the engine's
          rows, which are gone afterwards, to those with the new tokens, and what was sampled. To be
          called when all constraints are up to date.
        """
        raw = taken = rows = None
        if needs.chosen:
            taken = self._rows(logits, needs.chosen)
            rows = self._batch.build(plan, needs, len(taken))
        if needs.scored and not self._scores_processed:
            raw = self._rows(logits, needs.scored)

        def finish(last_tokens: jax.Array) -> tuple[jax.Array, Sampled]:
            tokens, to_score = None, raw
            if rows is not None:
                fill_masks(plan, needs, rows)
                last_tokens, tokens, changed = self._chosen(taken, last_tokens, rows, needs)
                if needs.scored and changed is not None:
                    where = {place: i for i, place in enumerate(needs.chosen)}
                    to_score = self._rows(changed, [where[place] for place in needs.scored])
            if to_score is None:
                return last_tokens, Sampled(tokens, None)
            scored = [plan.scheduled[place].row for place in needs.scored]
            logprobs = self._scores(to_score, last_tokens, scored, needs.num_logprobs)
            return last_tokens, Sampled(tokens, logprobs)

        return finish

    def warm_ups(self, step_sizes: Iterable[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Names of the common programs, and what compiles each by running it on nothing.

        ``step_sizes``: the numbers of rows of logits that a step may have.
        """
        for step_size in sorted({*step_sizes, *(self._sizes if self._scores_processed else ())}):
            for size in self._sizes:
                name = f"{size} of {step_size} rows"
                yield name, functools.partial(self._warm_up_rows, step_size, size)
                if size >= step_size:
                    break
        for size in self._sizes:
            for features in (MASKED, EDITED, UNFILTERED, FILTERED):
                name = f"sampling of {size} rows, {_names(features)}"
                yield name, functools.partial(self._warm_up_features, size, features)
            name = f"log probabilities of {size} rows"
            yield name, functools.partial(self._warm_up_scores, size)

    def _rows(self, logits: jax.Array, places: Sequence[int]) -> jax.Array:
        """These rows of f32[R, V], and padding."""
        size = next(size for size in self._sizes if size >= len(places))
        rows = np.zeros(size, np.int32)
        rows[: len(places)] = places
        return self._take(logits, rows, shapes=f"{size} of {len(logits)} rows")

    def _chosen(
        self, logits: Any, last_tokens: jax.Array, rows: SamplingRows, needs: SamplingNeeds
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        if needs.is_masked:
            logits = self._edited(logits, last_tokens, rows, MASKED)
        if needs.is_edited:
            logits = self._edited(logits, last_tokens, rows, EDITED)
        features = UNFILTERED
        if needs.filters:
            features = LARGE_TOP_K if needs.large_top_k else FILTERED
        packed = pack(dataclasses.replace(rows, mask=None, biased=None, blocked=None, seen=None))
        shapes = f"{len(logits)} rows, {_names(features)}"
        return self._choose(logits, last_tokens, packed, features=features, shapes=shapes)

    def _edited(
        self, logits: jax.Array, last_tokens: jax.Array, rows: SamplingRows, what: SamplingFeatures
    ) -> jax.Array:
        shapes = f"{len(logits)} rows, {_names(what)}"
        if what.masked:
            rows = dataclasses.replace(rows, biased=None, blocked=None, seen=None)
        else:
            seen, rows = rows.seen, dataclasses.replace(rows, mask=None)
            assert seen is not None
            shapes += f", lists of {len(seen.ids)} tokens"
        return self._edit(logits, last_tokens, pack(rows), features=what, shapes=shapes)

    def _scores(
        self, logits: jax.Array, last_tokens: jax.Array, rows: Sequence[int], k: int
    ) -> Logprobs:
        engine_rows = np.zeros(len(logits), np.int32)
        engine_rows[: len(rows)] = rows
        shapes = f"{len(logits)} rows, {k} most likely tokens"
        return self._score(logits, last_tokens, engine_rows, k=k, shapes=shapes)

    def _warm_up_rows(self, step_size: int, size: int) -> Any:
        return self._rows(self._no_logits(step_size), [0] * size)

    def _warm_up_scores(self, size: int) -> Any:
        k = logprobs_size(0, self._vocab_size)
        return self._scores(self._no_logits(size), self._no_tokens(), [0] * size, k)

    def _warm_up_features(self, size: int, features: SamplingFeatures) -> Any:
        needs = SamplingNeeds(is_masked=features.masked, is_edited=features.penalties)
        rows = self._batch.build(NO_REQUESTS, needs, size)
        logits, tokens = self._no_logits(size), self._no_tokens()
        if features in (MASKED, EDITED):
            return self._edited(logits, tokens, rows, features)
        return self._chosen(logits, tokens, rows, SamplingNeeds(filters=features.filters))

    def _no_logits(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, self._vocab_size))

    def _no_tokens(self) -> jax.Array:
        return jnp.zeros(self.num_rows, jnp.int32)


def _names(features: SamplingFeatures) -> str:
    return ", ".join(f.name for f in dataclasses.fields(features) if getattr(features, f.name))

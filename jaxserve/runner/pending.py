"""A step in flight, and the result that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.core.plan import ScheduledRequest, StepPlan, StepResult
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.runner.draft_rows import Verified
from jaxserve.runner.pooling import PooledVectors
from jaxserve.runner.prompt_logprobs import PromptScores
from jaxserve.runner.sampling_work import Sampled, SamplingWork
from jaxserve.sampling.logprobs import to_message


class PendingStep:
    """A step in flight: forward pass started -> `sample` -> sampler started -> `result`.

    Args:
      plan: the plan of the step.
      most_likely: i32[R], as in `Forward`.
      work: the sampler's part of the step.
      run_sampler: starts that part without waiting for it.
      scores: the prompt log probabilities of the step, or None.
      pooled: the pooled vectors of the step, or None.
      checks_finite: whether requests end whose logits or vectors are not finite.
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
        checks_finite: bool = True,
    ) -> None:
        self._plan = plan
        self._most_likely = most_likely
        self._work = work
        self._run_sampler = run_sampler
        self._scores = scores
        self._pooled = pooled
        self._checks_finite = checks_finite
        self._sampled: Sampled | None = None
        if not plan.speculates:
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
        num_drafts: list[int] = []
        if sampled.verified is None:
            tokens = np.array(self._most_likely)
            if sampled.tokens is not None:
                indices = list(self._work.needs.to_sample)
                drawn = sampled.tokens[: len(indices)]
                tokens[indices] = np.where(tokens[indices] < 0, tokens[indices], drawn)
            indices = [i for i, part in enumerate(self._plan.scheduled) if part.samples]
            rows = [range(i, i + 1) for i in indices]
            token_ids = tokens[indices, None].tolist()
        else:
            tokens = sampled.verified.tokens
            rows, num_drafts = _verified_rows(self._plan, sampled.verified)
            token_ids = [tokens[each.start : each.stop].tolist() for each in rows]
        failed: set[str] = set()
        scores = self._finite_only(self._scores, self._plan.scoring, failed)
        pooled = self._finite_only(self._pooled, self._plan.pooling, failed)
        if failed or tokens.min() < 0:  # rare
            rows = self._finite_rows(rows, tokens, failed)
            token_ids = [tokens[each.start : each.stop].tolist() for each in rows]
        return StepResult(
            token_ids,
            None if sampled.logprobs is None else self._logprobs(sampled, tokens, rows),
            prompt_logprobs=scores,
            pooled=pooled,
            num_drafts=num_drafts,
            not_finite=failed,
        )

    def _finite_only(
        self,
        pending: PromptScores | PooledVectors | None,
        parts: Sequence[ScheduledRequest],
        failed: set[str],
    ) -> Sequence[Any]:
        """Returns the results for these parts, and adds those that are not finite to ``failed``."""
        if pending is None:
            return ()
        results, is_finite = pending.result()
        if self._checks_finite:
            failed.update(p.request_id for p, ok in zip(parts, is_finite, strict=True) if not ok)
        return results

    def _finite_rows(
        self, rows: Sequence[range], tokens: Int32[np.ndarray, " rows"], failed: set[str]
    ) -> list[range]:
        """Cuts each range before the first marked token, and adds its request to ``failed``.

        Ranges of requests that have failed become empty.
        """
        finite: list[range] = []
        for part, each in zip(self._plan.sampling, rows, strict=True):
            marked = np.flatnonzero(tokens[each.start : each.stop] < 0)
            if part.request_id in failed:
                each = each[:0]
            elif len(marked):
                failed.add(part.request_id)
                each = each[: int(marked[0])]
            finite.append(each)
        return finite

    def _logprobs(
        self, sampled: Sampled, tokens: Int32[np.ndarray, " rows"], rows: Sequence[range]
    ) -> list[list[TokenLogprobs] | None]:
        """Returns entries for each of these ranges of rows, or None if a request asked for none."""
        assert sampled.logprobs is not None
        place_of = {row: place for place, row in enumerate(self._work.needs.to_score)}
        plan_rows, found = self._plan.rows, []
        for each in rows:
            k = plan_rows[each.start].params.logprobs
            entries = None
            if k is not None:
                entries = [
                    to_message(sampled.logprobs, place_of[row], int(tokens[row]), k) for row in each
                ]
            found.append(entries)
        return found


def _verified_rows(plan: StepPlan, verified: Verified) -> tuple[list[range], list[int]]:
    """Returns the accepted rows and the number of proposed drafts of each sampling request."""
    rows, num_drafts, first = [], [], 0
    for part in plan.scheduled:
        end = first + part.num_rows
        if part.samples:
            rows.append(range(first, first + int(verified.is_accepted[first:end].sum())))
            num_drafts.append(int(verified.is_live[first + 1 : end].sum()))
        first = end
    return rows, num_drafts

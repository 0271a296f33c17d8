"""Builds the sampler's inputs from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped, UInt32

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.token_rules import TokenRules
from jaxserve.sampling.inputs import (
    SMALL_TOP_K,
    BiasedTokens,
    BlockedTokens,
    Filters,
    SamplingInputs,
    SeenTokens,
)
from jaxserve.sampling.logprobs import logprobs_size
from jaxserve.sampling_params import REPETITION_PENALTIES, TEMPERATURES, SamplingParams

MIN_LIST = 1024
"""Entries of the shortest token lists that the sampler is compiled for."""

PADDING = SamplingParams(temperature=0.0, seed=0)
"""The parameters of rows that hold no request."""

Columns = tuple[Shaped[np.ndarray, " n"], ...]
"""The fields of a list of tokens, one array for each field."""


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """The work of the sampler in one step.

    Attributes:
      to_sample: indices in ``plan.rows`` of the rows whose token the sampler chooses. The others
        get the most likely token, which the step computes.
      to_score: indices in ``plan.rows`` of the rows whose requests want log probabilities.
      num_logprobs: number of most likely tokens to score for each of these.
      has_masks: at least one request may sample only some tokens.
      has_token_lists: at least one request has biases, penalties or blocked tokens.
      filters: the filters that at least one request needs.
    """

    to_sample: tuple[int, ...] = ()
    to_score: tuple[int, ...] = ()
    num_logprobs: int = 0
    has_masks: bool = False
    has_token_lists: bool = False
    filters: Filters = Filters.NONE


class SamplingBatchBuilder:
    """Builds the sampler's inputs, and remembers parameters and token rules of running requests.

    Args:
      num_rows: S, the engine's rows.
      vocab_size: V.
    """

    def __init__(self, *, num_rows: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._padding = _row_values(PADDING, vocab_size)
        self._values = {
            name: np.repeat(value[None], num_rows, 0) for name, value in self._padding.items()
        }
        # Only for rows that have rules. A finished request's rules stay until its row is reused.
        self._rules: dict[int, TokenRules] = {}

    def admit(self, part: ScheduledRequest) -> None:
        """Stores the parameters of a new request in its row."""
        row = part.row
        for name, value in _row_values(part.params, self._vocab_size).items():
            self._values[name][row] = value
        self._rules.pop(row, None)
        rules = TokenRules.of(part.params, self._vocab_size)
        if rules is not None:
            self._rules[row] = rules

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """Returns the work of the sampler for a plan.

        Each combination of stages is a program to compile, and an idle stage costs little. So if
        one filter is needed, all filters run. If one row needs a token list, all lists are applied
        to all rows that are sampled.
        """
        to_sample: list[int] = []
        to_score: list[int] = []
        random: list[SamplingParams] = []
        has_masks = has_token_lists = False
        rows = plan.rows
        for i, part in enumerate(rows):
            if not part.samples:
                continue
            params, rules = part.params, self._rules.get(part.row)
            if params.logprobs is not None:
                to_score.append(i)
            if not params.is_greedy:
                random.append(params)
            masked = part.constraint is not None or (rules is not None and rules.mask is not None)
            listed = (rules is not None and rules.has_token_lists) or bool(_blocked_ends(part))
            if masked or listed or not params.is_greedy:
                to_sample.append(i)
            has_masks, has_token_lists = has_masks or masked, has_token_lists or listed
        most = max((rows[i].params.logprobs or 0 for i in to_score), default=0)
        return SamplingNeeds(
            to_sample=tuple(to_sample),
            to_score=tuple(to_score),
            num_logprobs=logprobs_size(most, self._vocab_size),
            has_masks=has_masks,
            has_token_lists=has_token_lists,
            filters=_filters(random, self._vocab_size),
        )

    def build(self, plan: StepPlan, needs: SamplingNeeds, num_rows: int) -> SamplingInputs:
        """Returns the rows of ``needs.to_sample`` as numpy arrays, padded to ``num_rows``.

        The masks of constrained requests allow every token until `fill_masks` has filled them. The
        positions of requests that speculate are upper bounds.
        """
        plan_rows = plan.rows
        parts = [plan_rows[i] for i in needs.to_sample]
        rows = np.fromiter((part.row for part in parts), np.int32, len(parts))
        positions = np.fromiter((p.start + p.num_tokens for p in parts), np.int32, len(parts))
        arrays: dict[str, Any] = {
            "kept_in_row": _padded(self._kept_in_row(parts, rows), self._num_rows, num_rows),
            "positions": _padded(positions, 0, num_rows),
        }
        for name, values in self._values.items():
            arrays[name] = _padded(values[rows], self._padding[name], num_rows)
        if needs.has_masks:
            arrays["mask"] = self._mask(parts, num_rows)
        if needs.has_token_lists:
            arrays |= self._lists(parts, num_rows)
        return SamplingInputs(**arrays, filters=needs.filters)

    def _kept_in_row(
        self, parts: Sequence[ScheduledRequest], rows: Int32[np.ndarray, " n"]
    ) -> Int32[np.ndarray, " n"]:
        """Returns `SamplingInputs.kept_in_row`: not for requests that speculate."""
        if not any(part.speculates for part in parts):
            return rows
        return np.where([part.speculates for part in parts], self._num_rows, rows).astype(np.int32)

    def _lists(self, parts: Sequence[ScheduledRequest], num_rows: int) -> dict[str, Any]:
        """Returns the token lists of `SamplingInputs`, padded to the same length."""
        biased = self._biased(parts)
        blocked = self._blocked(parts)
        seen, pending_row = self._seen(parts, num_rows)
        size = _list_size(max(len(rows) for rows, *_ in (biased, blocked, seen)))

        def padded(columns: Columns, *padding: int | float) -> list[Any]:
            pairs = zip(columns, padding, strict=True)
            return [_padded(column, value, size) for column, value in pairs]

        return {
            "biased": BiasedTokens(*padded(biased, num_rows, 0, 0.0)),
            "blocked": BlockedTokens(*padded(blocked, num_rows, 0, -1, 0)),
            "seen": SeenTokens(*padded(seen, num_rows, 0, 0), pending_row),  # type: ignore[arg-type]
        }

    def _mask(
        self, parts: Sequence[ScheduledRequest], num_rows: int
    ) -> UInt32[np.ndarray, "{num_rows} words"]:
        mask = np.full((num_rows, -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for i, rules in self._rules_of(parts):
            if rules.mask is not None:
                mask[i] = rules.mask
        return mask

    def _biased(self, parts: Sequence[ScheduledRequest]) -> Columns:
        """Returns (row of logits, id, value)."""
        found = [(i, rules) for i, rules in self._rules_of(parts) if len(rules.bias_ids)]
        rows = [np.full(len(rules.bias_ids), i, np.int32) for i, rules in found]
        ids = [rules.bias_ids for _, rules in found]
        values = [rules.bias_values for _, rules in found]
        return _joined(rows, np.int32), _joined(ids, np.int32), _joined(values, np.float32)

    def _blocked(self, parts: Sequence[ScheduledRequest]) -> Columns:
        """Returns (row of logits, id, previous_row, previous_token), as in `BlockedTokens`."""
        entries: list[tuple[int, int, int, int]] = []
        for i, part in enumerate(parts):
            entries += [(i, token, -1, 0) for token in _blocked_ends(part)]
        for i, rules in self._rules_of(parts):
            if rules.bad_words is not None:
                ids, pairs = rules.bad_words.blocked(parts[i])
                entries += [(i, token, -1, 0) for token in ids]
                entries += [(i, token, parts[i].row, after) for token, after in pairs]
        return tuple(np.array(entries, np.int32).reshape(-1, 4).T)

    def _seen(
        self, parts: Sequence[ScheduledRequest], num_rows: int
    ) -> tuple[Columns, Int32[np.ndarray, " {num_rows}"]]:
        """Returns (row of logits, id, count), and `SeenTokens.pending_row`."""
        pending_row = np.full(num_rows, -1, np.int32)
        rows, ids, counts = [], [], []
        for i, rules in self._rules_of(parts):
            part, seen = parts[i], rules.counts
            if seen is None:
                continue
            seen.update(part.known_token_ids, part.num_prompt_tokens)
            rows.append(np.full(len(seen.ids), i, np.int32))
            ids.append(seen.ids)
            counts.append(seen.counts)
            if part.num_unknown_tokens:
                pending_row[i] = part.row
        return tuple(_joined(arrays, np.int32) for arrays in (rows, ids, counts)), pending_row

    def _rules_of(self, parts: Sequence[ScheduledRequest]) -> list[tuple[int, TokenRules]]:
        """Returns (index in ``parts``, rules) of the parts that have rules."""
        return [
            (i, self._rules[part.row]) for i, part in enumerate(parts) if part.row in self._rules
        ]


def fill_masks(plan: StepPlan, needs: SamplingNeeds, inputs: SamplingInputs) -> None:
    """Writes the tokens that constraints allow into ``inputs.mask``, a numpy array.

    Call it when the constraints have accepted all earlier tokens of their requests.
    """
    rows = plan.rows
    for row, i in enumerate(needs.to_sample):
        constraint = rows[i].constraint
        if constraint is not None:
            assert inputs.mask is not None
            constraint.fill_mask(inputs.mask[row])


def _row_values(params: SamplingParams, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns a request's entries in the fields of `SamplingInputs` that no step changes.

    ``params`` must be normalised; see `SamplingParams.normalised`.
    """
    assert params.seed is not None
    _check_normalised(params)
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    low, high = params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF
    return {
        "seeds": np.array([low, high], np.uint32),
        "top_k": np.array(top_k, np.int32),
        "temperature": np.array(params.temperature, np.float32),
        "top_p": np.array(params.top_p, np.float32),
        "min_p": np.array(params.min_p, np.float32),
        "repetition": np.array(params.repetition_penalty, np.float32),
        "frequency": np.array(params.frequency_penalty, np.float32),
        "presence": np.array(params.presence_penalty, np.float32),
    }


def _check_normalised(params: SamplingParams) -> None:
    """Asserts the part of `SamplingParams.normalised` that the sampler relies on."""
    temperature, filters = params.temperature, (params.top_k, params.top_p, params.min_p)
    if params.is_greedy:
        assert temperature == 0, f"a greedy request has temperature {temperature}, not 0"
        assert filters == (0, 1, 0), f"a greedy request has top_k, top_p, min_p {filters}"
    else:
        low, high = TEMPERATURES
        assert low <= temperature <= high, f"temperature {temperature} is not normalised"
    low, high = REPETITION_PENALTIES
    penalty = params.repetition_penalty
    assert low <= penalty <= high, f"repetition_penalty {penalty} is not normalised"


def _filters(random: Sequence[SamplingParams], vocab_size: int) -> Filters:
    """Returns the filters that at least one of these requests needs. None of them is greedy."""
    top_k = [params.top_k for params in random if 0 < params.top_k < vocab_size]
    if max(top_k, default=0) > SMALL_TOP_K:
        return Filters.LARGE_TOP_K
    if top_k or any(params.top_p < 1 or params.min_p > 0 for params in random):
        return Filters.SMALL_TOP_K
    return Filters.NONE


def _blocked_ends(part: ScheduledRequest) -> tuple[int, ...]:
    """Returns the end tokens that the request must not sample yet."""
    params = part.params
    num_output_tokens = part.start + part.num_tokens - part.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        return ()
    eos = () if part.eos_token_id is None else (part.eos_token_id,)
    return params.stop_token_ids + eos


def _list_size(length: int) -> int:
    """Returns the padded length of token lists: one of few sizes, each four times the previous."""
    size = MIN_LIST
    while size < length:
        size *= 4
    return size


def _joined(arrays: list[np.ndarray], dtype: type) -> Shaped[np.ndarray, " n"]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _padded(
    values: Shaped[np.ndarray, " n *rest"], padding: Any, size: int
) -> Shaped[np.ndarray, " {size} *rest"]:
    out = np.full((size, *values.shape[1:]), padding, values.dtype)
    out[: len(values)] = values
    return out

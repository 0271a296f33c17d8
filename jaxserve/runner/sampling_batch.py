"""From a plan to what the sampler is told about each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.token_rules import TokenRules
from jaxserve.sampling.logprobs import logprobs_size
from jaxserve.sampling.rows import (
    SMALL_TOP_K,
    BiasedTokens,
    BlockedTokens,
    SamplingFeatures,
    SamplingRows,
    SeenTokens,
)
from jaxserve.sampling_params import REPETITION_PENALTIES, TEMPERATURES, SamplingParams

MIN_LIST = 256
"""Entries of the shortest list of tokens that the sampler is compiled for."""


class SamplingBatchBuilder:
    """Builds the sampler's inputs; remembers parameters and token rules of the live requests.

    Args:
      num_rows: S, the engine's rows.
      vocab_size: V.
    """

    def __init__(self, *, num_rows: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._seeds = np.zeros((num_rows, 2), np.uint32)
        self._top_k = np.full(num_rows, vocab_size, np.int32)
        self._floats = np.zeros((6, num_rows), np.float32)
        # Of the rows that have any. Those of a request that has ended stay until its row is reused.
        self._rules: dict[int, TokenRules] = {}

    def admit(self, part: ScheduledRequest) -> None:
        """Forgets what the row of the request held and takes in its parameters."""
        row, params = part.row, part.params
        assert params.seed is not None
        self._seeds[row] = params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF
        self._top_k[row] = (
            min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        )
        self._floats[:, row] = (
            0.0 if params.is_greedy else np.clip(params.temperature, *TEMPERATURES),
            params.top_p,
            params.min_p,
            np.clip(params.repetition_penalty, *REPETITION_PENALTIES),
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._rules.pop(row, None)
        rules = TokenRules.of(params, self._vocab_size)
        if rules is not None:
            self._rules[row] = rules

    def features(self, sampling: Sequence[ScheduledRequest]) -> SamplingFeatures:
        """What the requests that sample need.

        Rounded up to few combinations: one filter brings the others, since each combination is a
        program to compile and an idle filter costs little.
        """
        params = [part.params for part in sampling]
        random = [p for p in params if not p.is_greedy]
        top_k = [k for p in random if 0 < (k := p.top_k) < self._vocab_size]
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        rules = [self._rules[part.row] for part in sampling if part.row in self._rules]
        constrained = any(part.constraint is not None for part in sampling)
        return SamplingFeatures(
            random=bool(random),
            filters=bool(top_k) or any(p.top_p < 1 or p.min_p > 0 for p in random),
            large_top_k=max(top_k, default=0) > SMALL_TOP_K,
            masked=constrained or any(r.mask is not None for r in rules),
            biased=any(len(r.bias_ids) for r in rules),
            blocked=any(_held_back(part) for part in sampling) or any(r.bad_words for r in rules),
            penalties=any(r.counts for r in rules),
            num_logprobs=logprobs_size(max(logprobs), self._vocab_size) if logprobs else None,
        )

    def build(self, plan: StepPlan, num_rows: int, features: SamplingFeatures) -> SamplingRows:
        """The rows of a plan, padded to ``num_rows``, as numpy arrays.

        Where tokens have to obey a constraint, `fill_masks` has to complete them.
        """
        parts = plan.scheduled
        live = np.fromiter((part.row for part in parts), np.int32, len(parts))
        targets = np.full(num_rows, self._num_rows, np.int32)
        positions = np.zeros(num_rows, np.int32)
        for i, part in enumerate(parts):
            if part.samples:
                targets[i] = part.row
                positions[i] = part.start + part.num_tokens

        def spread(values: np.ndarray, padding: float) -> np.ndarray:
            out = np.full((num_rows, *values.shape[1:]), padding, values.dtype)
            out[: len(live)] = values[live]
            return out

        temperature, top_p, min_p, repetition, frequency, presence = self._floats
        arrays: dict[str, Any] = {
            "targets": targets,
            "positions": positions,
            "seeds": spread(self._seeds, 0),
            "temperature": spread(temperature, 0),
            "top_k": spread(self._top_k, self._vocab_size),
            "top_p": spread(top_p, 1),
            "min_p": spread(min_p, 0),
            "repetition": spread(repetition, 1),
            "frequency": spread(frequency, 0),
            "presence": spread(presence, 0),
        }
        if features.masked:
            arrays["mask"] = self._mask(parts, num_rows)
        return SamplingRows(
            **arrays,
            biased=self._biased(parts, num_rows) if features.biased else None,
            blocked=self._blocked(parts, num_rows) if features.blocked else None,
            seen=self._seen(parts, num_rows) if features.penalties else None,
        )

    def _mask(self, parts: Sequence[ScheduledRequest], num_rows: int) -> np.ndarray:
        mask = np.full((num_rows, -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for i, rules in self._rules_of(parts):
            if rules.mask is not None:
                mask[i] = rules.mask
        return mask

    def _biased(self, parts: Sequence[ScheduledRequest], num_rows: int) -> BiasedTokens:
        found = [(i, rules) for i, rules in self._rules_of(parts) if len(rules.bias_ids)]
        rows = [np.full(len(rules.bias_ids), i, np.int32) for i, rules in found]
        size = _list_size(sum(map(len, rows)))
        arrays: dict[str, Any] = {
            "rows": _joined(rows, size, padding=num_rows),
            "ids": _joined([rules.bias_ids for _, rules in found], size, padding=0),
            "values": _joined([rules.bias_values for _, rules in found], size, padding=0.0),
        }
        return BiasedTokens(**arrays)

    def _blocked(self, parts: Sequence[ScheduledRequest], num_rows: int) -> BlockedTokens:
        # (row of logits, id, row of the engine that holds the token that decides, that token)
        entries: list[tuple[int, int, int, int]] = []
        for i, part in enumerate(parts):
            if part.samples:
                entries += [(i, token, -1, 0) for token in _held_back(part)]
        for i, rules in self._rules_of(parts):
            if rules.bad_words is not None:
                ids, pairs = rules.bad_words.blocked(parts[i])
                entries += [(i, token, -1, 0) for token in ids]
                entries += [(i, token, parts[i].row, after) for token, after in pairs]
        size = _list_size(len(entries))
        columns = np.full((4, size), [[num_rows], [0], [-1], [0]], np.int32)
        if entries:
            columns[:, : len(entries)] = np.array(entries, np.int32).T
        arrays: dict[str, Any] = dict(
            zip(("rows", "ids", "sources", "after"), columns, strict=True)
        )
        return BlockedTokens(**arrays)

    def _seen(self, parts: Sequence[ScheduledRequest], num_rows: int) -> SeenTokens:
        pending = np.full(num_rows, -1, np.int32)
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
                pending[i] = part.row
        size = _list_size(sum(map(len, ids)))
        arrays: dict[str, Any] = {
            "rows": _joined(rows, size, padding=num_rows),
            "ids": _joined(ids, size, padding=0),
            "counts": _joined(counts, size, padding=0),
            "pending": pending,
        }
        return SeenTokens(**arrays)

    def _rules_of(self, parts: Sequence[ScheduledRequest]) -> list[tuple[int, TokenRules]]:
        """The rules of the parts that sample and have any, with their place in the step."""
        return [
            (i, self._rules[part.row])
            for i, part in enumerate(parts)
            if part.samples and part.row in self._rules
        ]


def fill_masks(plan: StepPlan, rows: SamplingRows) -> None:
    """Writes what constraints allow into ``rows.mask``, a numpy array, when they are up to date."""
    for i, part in enumerate(plan.scheduled):
        if part.samples and part.constraint is not None:
            assert rows.mask is not None
            part.constraint.fill_mask(rows.mask[i])


def _held_back(part: ScheduledRequest) -> tuple[int, ...]:
    """The end tokens that must not be sampled yet for this request."""
    params: SamplingParams = part.params
    num_output_tokens = part.start + part.num_tokens - part.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        return ()
    eos = () if part.eos_token_id is None else (part.eos_token_id,)
    return params.stop_token_ids + eos


def _list_size(length: int) -> int:
    """The padded size of a list, in powers of four so that there are few."""
    size = MIN_LIST
    while size < length:
        size *= 4
    return size


def _joined(pieces: list[np.ndarray], size: int, *, padding: float) -> np.ndarray:
    joined = np.concatenate(pieces)
    return np.pad(joined, (0, size - len(joined)), constant_values=padding)

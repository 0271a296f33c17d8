"""From a plan to what the sampler is told about each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.token_rules import TokenRules
from jaxserve.sampling.logprobs import logprobs_size
from jaxserve.sampling.rows import (
    SMALL_TOP_K,
    BiasedTokens,
    BlockedTokens,
    SamplingRows,
    SeenTokens,
)
from jaxserve.sampling_params import REPETITION_PENALTIES, TEMPERATURES, SamplingParams

MIN_LIST = 1024
"""Entries of the shortest lists of tokens that the sampler is compiled for."""

Columns = tuple[np.ndarray, ...]
"""A list of tokens, field by field."""


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the requests of a step ask of the sampler, beyond the most likely token.

    Attributes:
      chosen: places in the plan of the requests whose tokens the sampler chooses.
      scored: places in the plan of the requests that want log probabilities.
      num_logprobs: of so many of the most likely tokens.
      is_masked: a request may use some tokens only.
      is_edited: a request has biases, penalties or tokens that are held back.
      filters, large_top_k: see `SamplingFeatures`.
    """

    chosen: tuple[int, ...] = ()
    scored: tuple[int, ...] = ()
    num_logprobs: int = 0
    is_masked: bool = False
    is_edited: bool = False
    filters: bool = False
    large_top_k: bool = False


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
        row, params, seed = part.row, part.params, part.params.seed
        assert seed is not None
        if params.is_greedy:  # nothing is drawn that could be filtered
            params = msgspec.structs.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self._seeds[row] = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
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

    def needs(self, plan: StepPlan) -> SamplingNeeds:
        """What the requests of a plan ask of the sampler.

        Rounded up to few combinations, since each is a program to compile and an idle stage costs
        little: one filter brings the others, and one list of tokens the others.
        """
        chosen: list[int] = []
        scored: list[int] = []
        random: list[SamplingParams] = []
        is_masked = is_edited = False
        for i, part in enumerate(plan.scheduled):
            if not part.samples:
                continue
            params, rules = part.params, self._rules.get(part.row)
            if params.logprobs is not None:
                scored.append(i)
            if not params.is_greedy:
                random.append(params)
            masked = part.constraint is not None or (rules is not None and rules.mask is not None)
            edited = (rules is not None and rules.has_lists) or bool(_held_back(part))
            if masked or edited or not params.is_greedy:
                chosen.append(i)
            is_masked, is_edited = is_masked or masked, is_edited or edited
        top_k = [k for p in random if 0 < (k := p.top_k) < self._vocab_size]
        most = max((plan.scheduled[i].params.logprobs or 0 for i in scored), default=0)
        return SamplingNeeds(
            chosen=tuple(chosen),
            scored=tuple(scored),
            num_logprobs=logprobs_size(most, self._vocab_size),
            is_masked=is_masked,
            is_edited=is_edited,
            filters=bool(top_k) or any(p.top_p < 1 or p.min_p > 0 for p in random),
            large_top_k=max(top_k, default=0) > SMALL_TOP_K,
        )

    def build(self, plan: StepPlan, needs: SamplingNeeds, num_rows: int) -> SamplingRows:
        """The rows of ``needs.chosen``, padded to ``num_rows``, as numpy arrays.

        Where tokens have to obey a constraint, `fill_masks` has to complete them.
        """
        parts = [plan.scheduled[i] for i in needs.chosen]
        live = np.fromiter((part.row for part in parts), np.int32, len(parts))
        targets = np.full(num_rows, self._num_rows, np.int32)
        positions = np.zeros(num_rows, np.int32)
        for i, part in enumerate(parts):
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
        if needs.is_masked:
            arrays["mask"] = self._mask(parts, num_rows)
        if needs.is_edited:
            arrays |= self._lists(parts, num_rows)
        return SamplingRows(**arrays)

    def _lists(self, parts: Sequence[ScheduledRequest], num_rows: int) -> dict[str, Any]:
        """What is said of single tokens, in lists of one length."""
        biased = self._biased(parts)
        blocked = self._blocked(parts)
        seen, pending = self._seen(parts, num_rows)
        size = _list_size(max(len(rows) for rows, *_ in (biased, blocked, seen)))

        def padded(columns: Columns, *padding: float) -> list[Any]:
            whole = []
            for column, value in zip(columns, padding, strict=True):
                whole.append(np.full(size, value, column.dtype))
                whole[-1][: len(column)] = column
            return whole

        return {
            "biased": BiasedTokens(*padded(biased, num_rows, 0, 0.0)),
            "blocked": BlockedTokens(*padded(blocked, num_rows, 0, -1, 0)),
            "seen": SeenTokens(*padded(seen, num_rows, 0, 0), pending),  # type: ignore[arg-type]
        }

    def _mask(self, parts: Sequence[ScheduledRequest], num_rows: int) -> np.ndarray:
        mask = np.full((num_rows, -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for i, rules in self._rules_of(parts):
            if rules.mask is not None:
                mask[i] = rules.mask
        return mask

    def _biased(self, parts: Sequence[ScheduledRequest]) -> Columns:
        """Row of logits, id, value."""
        found = [(i, rules) for i, rules in self._rules_of(parts) if len(rules.bias_ids)]
        rows = [np.full(len(rules.bias_ids), i, np.int32) for i, rules in found]
        ids = [rules.bias_ids for _, rules in found]
        values = [rules.bias_values for _, rules in found]
        return _joined(rows, np.int32), _joined(ids, np.int32), _joined(values, np.float32)

    def _blocked(self, parts: Sequence[ScheduledRequest]) -> Columns:
        """Row of logits, id, row of the engine that holds the token that decides, that token."""
        entries: list[tuple[int, int, int, int]] = []
        for i, part in enumerate(parts):
            entries += [(i, token, -1, 0) for token in _held_back(part)]
        for i, rules in self._rules_of(parts):
            if rules.bad_words is not None:
                ids, pairs = rules.bad_words.blocked(parts[i])
                entries += [(i, token, -1, 0) for token in ids]
                entries += [(i, token, parts[i].row, after) for token, after in pairs]
        return tuple(np.array(entries, np.int32).reshape(-1, 4).T)

    def _seen(self, parts: Sequence[ScheduledRequest], num_rows: int) -> tuple[Columns, np.ndarray]:
        """(Row of logits, id, count), and where tokens are that are not counted yet."""
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
        return tuple(_joined(pieces, np.int32) for pieces in (rows, ids, counts)), pending

    def _rules_of(self, parts: Sequence[ScheduledRequest]) -> list[tuple[int, TokenRules]]:
        """The rules of the parts that have any, with their place among them."""
        return [
            (i, self._rules[part.row]) for i, part in enumerate(parts) if part.row in self._rules
        ]


def fill_masks(plan: StepPlan, needs: SamplingNeeds, rows: SamplingRows) -> None:
    """Writes what constraints allow into ``rows.mask``, a numpy array, when they are up to date."""
    for i, place in enumerate(needs.chosen):
        constraint = plan.scheduled[place].constraint
        if constraint is not None:
            assert rows.mask is not None
            constraint.fill_mask(rows.mask[i])


def _held_back(part: ScheduledRequest) -> tuple[int, ...]:
    """The end tokens that must not be sampled yet for this request."""
    params: SamplingParams = part.params
    num_output_tokens = part.start + part.num_tokens - part.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        return ()
    eos = () if part.eos_token_id is None else (part.eos_token_id,)
    return params.stop_token_ids + eos


def _list_size(length: int) -> int:
    """The padded size of lists, in powers of four so that there are few."""
    size = MIN_LIST
    while size < length:
        size *= 4
    return size


def _joined(pieces: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)

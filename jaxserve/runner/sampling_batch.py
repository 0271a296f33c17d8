"""From a plan to what the sampler is told about each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.core.plan import ScheduledRequest, StepPlan
from jaxserve.runner.token_counts import TokenCounts
from jaxserve.sampling.rows import (
    SMALL_TOP_K,
    BlockedTokens,
    SamplingFeatures,
    SamplingRows,
    SeenTokens,
)
from jaxserve.sampling_params import MIN_TEMPERATURE, SamplingParams

LOGPROBS_SIZES = (1, 5, 20)
"""Numbers of most likely tokens that the sampler is compiled for."""

MIN_LIST = 256
"""Entries of the shortest list of blocked or seen tokens that the sampler is compiled for."""


class SamplingBatchBuilder:
    """Builds the sampler's inputs; remembers parameters and token counts of the live requests.

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
        self._counts: dict[int, TokenCounts] = {}

    def admit(self, part: ScheduledRequest) -> None:
        """Forgets what the row of the request held and takes in its parameters."""
        row, params = part.row, part.params
        assert params.seed is not None
        self._seeds[row] = params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF
        self._top_k[row] = (
            min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        )
        self._floats[:, row] = (
            0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._counts.pop(row, None)
        if params.has_penalties:
            self._counts[row] = TokenCounts()

    def features(self, sampling: Sequence[ScheduledRequest]) -> SamplingFeatures:
        """What the requests that sample need.

        Rounded up to few combinations: one filter brings the others, since each combination is a
        program to compile and an idle filter costs little.
        """
        params = [part.params for part in sampling]
        random = [p for p in params if not p.is_greedy]
        top_k = [k for p in random if 0 < (k := p.top_k) < self._vocab_size]
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        return SamplingFeatures(
            random=bool(random),
            filters=bool(top_k) or any(p.top_p < 1 or p.min_p > 0 for p in random),
            large_top_k=max(top_k, default=0) > SMALL_TOP_K,
            blocked=any(_blocked_ids(part) for part in sampling),
            penalties=any(p.has_penalties for p in params),
            num_logprobs=self._logprobs_size(max(logprobs)) if logprobs else None,
        )

    def build(self, plan: StepPlan, num_rows: int, features: SamplingFeatures) -> SamplingRows:
        """The rows of a plan, padded to ``num_rows``, as numpy arrays."""
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
        return SamplingRows(
            **arrays,
            blocked=_blocked(parts, num_rows) if features.blocked else None,
            seen=self._seen(parts, num_rows) if features.penalties else None,
        )

    def _seen(self, parts: Sequence[ScheduledRequest], num_rows: int) -> SeenTokens:
        pending = np.full(num_rows, -1, np.int32)
        rows, ids, counts = [], [], []
        for i, part in enumerate(parts):
            if not (part.samples and part.params.has_penalties):
                continue
            seen = self._counts[part.row]
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

    def _logprobs_size(self, k: int) -> int:
        size = next(size for size in LOGPROBS_SIZES if size >= k)
        return min(size, self._vocab_size)


def _blocked_ids(part: ScheduledRequest) -> tuple[int, ...]:
    """The tokens that must not be sampled for this request now."""
    params: SamplingParams = part.params
    num_output_tokens = part.start + part.num_tokens - part.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        return ()
    eos = () if part.eos_token_id is None else (part.eos_token_id,)
    return params.stop_token_ids + eos


def _blocked(parts: Sequence[ScheduledRequest], num_rows: int) -> BlockedTokens:
    per_part = [_blocked_ids(part) if part.samples else () for part in parts]
    rows = [np.full(len(ids), i, np.int32) for i, ids in enumerate(per_part)]
    ids = [np.asarray(ids, np.int32) for ids in per_part]
    size = _list_size(sum(map(len, ids)))
    arrays: dict[str, Any] = {
        "rows": _joined(rows, size, padding=num_rows),
        "ids": _joined(ids, size, padding=0),
    }
    return BlockedTokens(**arrays)


def _list_size(length: int) -> int:
    """The padded size of a list, in powers of four so that there are few."""
    size = MIN_LIST
    while size < length:
        size *= 4
    return size


def _joined(pieces: list[np.ndarray], size: int, *, padding: int) -> np.ndarray:
    out = np.full(size, padding, np.int32)
    if pieces:
        joined = np.concatenate(pieces)
        out[: len(joined)] = joined
    return out

"""How often each token occurs in a request, counted as the request grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """The distinct tokens of one request and how often each was generated."""

    def __init__(self) -> None:
        self._num_counted = 0
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, np.int32)
        self._counts = np.zeros(64, np.int32)

    def update(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Counts what has been added to the request's tokens since the last call."""
        for position in range(self._num_counted, len(token_ids)):
            token = token_ids[position]
            at = self._index.setdefault(token, len(self._index))
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token
            self._counts[at] += position >= num_prompt_tokens
        self._num_counted = len(token_ids)

    @property
    def ids(self) -> np.ndarray:
        """i32[N], each token once."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """i32[N], how often each token was generated; 0 if it is in the prompt only."""
        return self._counts[: len(self._index)]

"""The token rules of a request, from which the sampler's inputs are built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from jaxserve.core.plan import ScheduledRequest
from jaxserve.sampling_params import BIAS_LIMIT, MAX_BAD_WORD_TOKENS, SamplingParams


class TokenRules:
    """The biases, allowed tokens, bad words and token counts of one request.

    Attributes:
      counts: the tokens that penalties apply to, or None without penalties.
      bias_ids, bias_values: i32[N] and f32[N]; N is 0 without biases.
      mask: u32[ceil(V / 32)], as in `SamplingInputs.mask`, or None if all tokens are allowed.
      bad_words: the token sequences to avoid, or None.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.counts = TokenCounts() if params.has_penalties else None
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias, np.int32, len(bias))
        values = np.fromiter(bias.values(), np.float64, len(bias))
        self.bias_values = values.clip(-BIAS_LIMIT, BIAS_LIMIT).astype(np.float32)
        allowed = params.allowed_token_ids
        self.mask = None if allowed is None else _mask(allowed, vocab_size)
        words = params.bad_words_token_ids
        self.bad_words = BadWords(words) if words else None

    @property
    def has_token_lists(self) -> bool:
        """Whether the request has biases, bad words or penalties."""
        return self.counts is not None or len(self.bias_ids) > 0 or self.bad_words is not None

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> TokenRules | None:
        """Returns the rules of a request, or None if it has none, like nearly all requests."""
        has_rules = (
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
        )
        return cls(params, vocab_size) if has_rules else None


class TokenCounts:
    """The distinct tokens of one request and how often each was generated.

    The counts are updated as the request grows.
    """

    def __init__(self) -> None:
        self._num_counted = 0
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, np.int32)
        self._counts = np.zeros(64, np.int32)

    def update(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Counts the tokens that were appended to ``token_ids`` since the last call."""
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
    def ids(self) -> Int32[np.ndarray, " n"]:
        """i32[N], each token once."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Int32[np.ndarray, " n"]:
        """i32[N], how often each token was generated; 0 if only the prompt contains it."""
        return self._counts[: len(self._index)]


class BadWords:
    """Token sequences whose last token must not follow their other tokens in the output.

    The sequences are indexed, so that a step need not go through all of them.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        # `blocked` looks up words by the last token that the host knows. It must be the second-last
        # token of the word, or the third-last if the host does not know the newest token yet.
        self._single = [word[-1] for word in words if len(word) == 1]
        self._pairs = [word for word in words if len(word) == 2]
        self._by_second_last: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._by_third_last: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) >= 2:
                self._by_second_last[word[-2]].append(word)
            if len(word) >= 3:
                self._by_third_last[word[-3]].append(word)

    def blocked(self, part: ScheduledRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens that the request must not sample in this step.

        Returns:
          (ids, pairs). The ids are blocked. The id of a pair (id, token) is blocked if the newest
          token, which the host has not seen yet, equals token.
        """
        known = part.known_token_ids
        output = known[max(part.num_prompt_tokens, len(known) - MAX_BAD_WORD_TOKENS) :]
        last = output[-1] if output else -1
        if part.num_unknown_tokens == 0:
            words = self._by_second_last.get(last, ())
            return self._single + [w[-1] for w in words if _ends_with(output, w[:-1])], []
        words = self._by_third_last.get(last, ())
        words = self._pairs + [word for word in words if _ends_with(output, word[:-2])]
        return self._single, [(word[-1], word[-2]) for word in words]


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return len(tokens) >= len(end) and tuple(tokens[-len(end) :]) == end


def _mask(ids: Sequence[int], vocab_size: int) -> UInt32[np.ndarray, " words"]:
    """Returns one bit per token, 1 for the given ids, as u32[ceil(V / 32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")

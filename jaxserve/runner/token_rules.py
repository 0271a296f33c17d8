"""What a request says about single tokens, in the form that the sampler's inputs are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxserve.core.plan import ScheduledRequest
from jaxserve.runner.token_counts import TokenCounts
from jaxserve.sampling_params import BIAS_LIMIT, MAX_BAD_WORD_TOKENS, SamplingParams


class TokenRules:
    """The biases, allowed tokens, bad words and token counts of one request.

    Attributes:
      counts: for penalties, or None.
      bias_ids, bias_values: i32[N] and f32[N]; N is 0 without biases.
      mask: u32[ceil(V / 32)], as in `SamplingRows.mask`, or None if all tokens are allowed.
      bad_words: or None.
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
    def has_lists(self) -> bool:
        """Whether there is more than a mask."""
        return self.counts is not None or len(self.bias_ids) > 0 or self.bad_words is not None

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> TokenRules | None:
        """The rules of a request, or None if it has none, as nearly all."""
        has_rules = (
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
        )
        return cls(params, vocab_size) if has_rules else None


class BadWords:
    """Token sequences of which the last token must not follow the others in an answer.

    Looked up by the last token before, so that a step need not go through all of them.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = [word[-1] for word in words if len(word) == 1]
        self._pairs = [word for word in words if len(word) == 2]
        self._by_last: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._by_last_but_one: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) >= 2:
                self._by_last[word[-2]].append(word)
            if len(word) >= 3:
                self._by_last_but_one[word[-3]].append(word)

    def blocked(self, part: ScheduledRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """What the request must not sample now.

        Returns:
          (ids that are blocked, (id, token) pairs: id is blocked if the token that the host has
          not seen yet is that one).
        """
        known = part.known_token_ids
        output = known[max(part.num_prompt_tokens, len(known) - MAX_BAD_WORD_TOKENS) :]
        last = output[-1] if output else -1
        if part.num_unknown_tokens == 0:
            words = self._by_last.get(last, ())
            return self._single + [w[-1] for w in words if _ends_with(output, w[:-1])], []
        words = self._by_last_but_one.get(last, ())
        words = self._pairs + [word for word in words if _ends_with(output, word[:-2])]
        return self._single, [(word[-1], word[-2]) for word in words]


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return len(tokens) >= len(end) and tuple(tokens[-len(end) :]) == end


def _mask(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")

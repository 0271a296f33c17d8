"""The tokens of a model in the form that llguidance needs, and masks over them.

A mask is u32[num_words]; token 32 w + b is bit b of word w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask


class TokenSource(Protocol):
    """The part of a `Tokenizer` that grammars need."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """ID of the end token, or None."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """IDs of the tokens that stand for no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token IDs of a text."""
        ...


class Vocabulary:
    """The tokens that a grammar can allow.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: width of the logits. Tokens with higher IDs are left out. Logits after the last
        token are never allowed.

    Attributes:
      tokens: the bytes of each token.
      num_words: number of words in a mask.
      eos_token_id: ID of the token that stands for the end of the text.
      special_ids: IDs of the tokens that stand for no text.
      first_bytes: u8[len(tokens)], the first byte of each token; 0 if it has none.
      space_mask: u32[num_words], the tokens that begin with whitespace.
      space_lengths: IDs of the tokens that are only whitespace -> their length in bytes.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        size = min(tokenizer.vocab_size, vocab_size)
        self.special_ids = frozenset(i for i in tokenizer.special_ids if i < size)
        eos = tokenizer.eos_token_id
        # llguidance needs an end token, even if no request ever samples it.
        other = max(self.special_ids, default=size - 1)
        self.eos_token_id = other if eos is None or eos >= size else eos
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.first_bytes = np.array([token[0] if token else 0 for token in self.tokens], np.uint8)
        self.num_words = -(-size // 32)
        adapter: Any = LLGuidanceTokenizer(
            tokenizer, self.tokens, self.eos_token_id, self.special_ids
        )
        self._tokenizer = LLTokenizer(adapter)
        starts = np.zeros(self.num_words * 32, np.uint8)
        self.space_lengths: dict[int, int] = {}
        for i, token in enumerate(self.tokens):
            starts[i] = token[:1].isspace()
            if starts[i] and token.isspace():
                self.space_lengths[i] = len(token)
        self.space_mask = np.packbits(starts, bitorder="little").view("<u4")

    def matcher(self, source: str, limits: LLParserLimits) -> LLMatcher:
        """Compiles a grammar that llguidance can read; releases the GIL.

        Does not raise for a bad grammar: ``is_error()`` of the matcher is then true.
        """
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def fill(self, matcher: LLMatcher, mask: np.ndarray) -> None:
        """Writes the tokens that a matcher allows next into mask u32[num_words]."""
        fill_next_token_bitmask(matcher, mask.view(np.int32)[None])


def tokens_in(mask: np.ndarray) -> np.ndarray:
    """Returns the token IDs i64[n] in a mask, in ascending order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


class LLGuidanceTokenizer:
    """The interface that `LLTokenizer` expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: TokenSource,
        tokens: Sequence[bytes],
        eos_token_id: int,
        special_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special_ids | {eos_token_id})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

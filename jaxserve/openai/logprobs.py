"""Log probabilities in the forms of the API.

Each entry is made JSON text at once (`encoding.as_json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.openai.encoding import as_json
from jaxserve.openai.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from jaxserve.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON lacks; its negative replaces plus infinity."""

TokenName = Callable[[int], str]
"""Returns the name of a token in log probabilities, given its ID."""


def token_string(token_bytes: bytes) -> str:
    r"""Returns a token as a string; bytes of incomplete characters become ``\xf0``."""
    return token_bytes.decode("utf-8", "backslashreplace")


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> TokenName:
    """Returns a function that names tokens by their text, or as ``token_id:5``."""
    if as_ids:
        return _id_name
    return lambda token_id: token_string(tokenizer.token_bytes(token_id))


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """Returns a number that JSON can hold. NaN counts as minus infinity."""
    if logprob == math.inf:
        return -LOWEST
    return logprob if logprob > LOWEST else LOWEST


class CompletionScores:
    """Builds the ``logprobs`` of one completion of /v1/completions, piece by piece.

    ``top_logprobs`` always holds the token itself, with the same number as ``token_logprobs``. It
    therefore has ``k + 1`` entries when the token is not among the ``k`` most likely ones.

    Args:
      tokenizer: the tokenizer of the model.
      name: names a token.
      k: how many of the most likely tokens to show.
    """

    def __init__(self, tokenizer: Tokenizer, name: TokenName, k: int) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._k = k
        self._offset = 0

    def prompt(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """Returns the entries of a prompt that is echoed as ``text``. The first has no numbers.

        Tokens that the tokenizer adds before the text have the offset 0.
        """
        lengths = [len(token_string(self._tokenizer.token_bytes(i))) for i in ids]
        self._offset = len(text) - sum(lengths)
        result = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            self._add(result, token_id, entry)
        return result

    def generated(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the entries of the next generated tokens."""
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._add(result, entry.token_ids[0], entry)
        return result

    def _add(self, result: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None) -> None:
        result.text_offset.append(max(self._offset, 0))
        self._offset += len(token_string(self._tokenizer.token_bytes(token_id)))
        result.tokens.append(self._name(token_id))
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            return
        values = [finite(logprob) for logprob in entry.logprobs[: self._k + 1]]
        result.token_logprobs.append(values[0])
        top = self._by_name(entry.token_ids[: self._k + 1], values)
        result.top_logprobs.append(as_json(top))

    def _by_name(self, token_ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """Returns the numbers by the names of their tokens.

        Several tokens can have one text, such as a byte and a letter, or IDs without a token. The
        token itself has it here, else the most likely of them; the others are named by their IDs.
        """
        by_name: dict[str, float] = {}
        known: set[int] = set()
        for token_id, value in zip(token_ids, values, strict=True):
            if token_id in known:  # the token itself occurs twice
                continue
            known.add(token_id)
            name = self._name(token_id)
            by_name[_id_name(token_id) if name in by_name else name] = value
        return by_name


def extend(scores: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Appends the entries of ``more`` to ``scores``."""
    scores.text_offset += more.text_offset
    scores.token_logprobs += more.token_logprobs
    scores.tokens += more.tokens
    scores.top_logprobs += more.top_logprobs


def chat_logprobs(
    tokenizer: Tokenizer, name: TokenName, entries: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """Returns log probabilities in the form of /v1/chat/completions."""
    return ChatLogprobs([as_json(_chat_entry(tokenizer, name, entry)) for entry in entries])


def _chat_entry(tokenizer: Tokenizer, name: TokenName, entry: TokenLogprobs) -> ChatTokenLogprob:
    top = [
        TopLogprob(name(token_id), finite(logprob), list(tokenizer.token_bytes(token_id)))
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
    ]
    sampled = top.pop(0)
    return ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top)


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], k: int
) -> PromptLogprobs:
    """Returns the ``prompt_logprobs`` field: entries by token ID, the token itself first."""
    return [None if entry is None else as_json(_by_id(tokenizer, entry, k)) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs, k: int) -> dict[str, PromptLogprob]:
    """Returns the tokens at one position by ID: the token itself, then the ``k`` most likely."""
    ranks = [entry.rank, *range(1, k + 1)]
    by_id: dict[str, PromptLogprob] = {}
    # Entries may have more than k likely tokens; `zip` stops after k.
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=False):
        text = token_string(tokenizer.token_bytes(token_id))
        by_id.setdefault(str(token_id), PromptLogprob(finite(logprob), rank, text))
    return by_id

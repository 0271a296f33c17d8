"""Log probabilities in the two forms that the API has for them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.messages import TokenLogprobs
from jaxserve.openai.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from jaxserve.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not."""


def token_string(token_bytes: bytes) -> str:
    r"""A token as text; bytes that are no character on their own are shown as ``\xf0``."""
    return token_bytes.decode("utf-8", "backslashreplace")


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if logprob > LOWEST else LOWEST


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, offset: int
) -> CompletionLogprobs:
    """The form of /v1/completions.

    ``top_logprobs`` always holds the sampled token, with the same number as ``token_logprobs``, so
    it has one entry more than was asked for when the sampled token is not among the likeliest.
    ``offset`` is the length of the token strings before.
    """
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        values = [finite(logprob) for logprob in entry.logprobs]
        strings = [token_string(tokenizer.token_bytes(i)) for i in entry.token_ids]
        result.text_offset.append(offset)
        result.token_logprobs.append(values[0])
        result.tokens.append(strings[0])
        # Different tokens may look the same: the sampled one counts, then the likelier one.
        result.top_logprobs.append(dict(zip(reversed(strings), reversed(values), strict=True)))
        offset += len(strings[0])
    return result


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The form of /v1/chat/completions."""
    return ChatLogprobs([_chat_entry(tokenizer, entry) for entry in entries])


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> ChatTokenLogprob:
    top = []
    for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
        token_bytes = tokenizer.token_bytes(token_id)
        top.append(TopLogprob(token_string(token_bytes), finite(logprob), list(token_bytes)))
    sampled = top.pop(0)
    return ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top)

"""Encodes texts whose length has no limit of its own, with a limit on the work.

A text of digits can have a token for each character, and each token takes about a hundred bytes
while the text is encoded. So a long text is first encoded in parts, until it is certain that it has
too many tokens.
"""

from __future__ import annotations

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.front.work_pool import Caller

CHARS_PER_TOKEN = 4
"""A text of up to this many characters for each token of the limit is encoded at once."""

CERTAINTY = 2
"""The parts of a text have fewer than this many times the tokens of the whole text. They have more
tokens than it, because their ends cut tokens, but a part is far longer than a token."""

MIN_PART_CHARS = 2**14


def encode_within(
    model: ServedModel, text: str, limit: int, caller: Caller, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the token IDs of a text.

    Args:
      model: has the tokenizer.
      text: the text.
      limit: texts that certainly have more tokens are refused, at least 1.
      caller: who waits for the IDs.
      add_special_tokens: see `Tokenizer.encode`.

    Raises:
      ContextLengthError: the text has more tokens than ``limit``, which is the context length.
      InvalidRequestError: the text has more tokens than another ``limit``, or lone surrogates.
      Abandoned: the caller has left.
    """
    caller.check()
    at_least = -(-len(text) // model.longest_token) if len(text) > limit else 0
    if at_least <= limit and len(text) > max(CHARS_PER_TOKEN * limit, MIN_PART_CHARS):
        at_least = max(at_least, _num_tokens(model, text, limit, caller) // CERTAINTY)
    if at_least > limit:
        has = f"has {len(text)} characters, which are at least {at_least} tokens"
        if limit == model.max_model_len:
            raise ContextLengthError(
                f"the maximum context length is {limit} tokens, but the prompt {has}"
            )
        raise InvalidRequestError(f"a text must have at most {limit} tokens, but this one {has}")
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _num_tokens(model: ServedModel, text: str, limit: int, caller: Caller) -> int:
    """Returns the tokens of all parts of a text, or of as many as show that there are too many."""
    part_chars = max(limit, MIN_PART_CHARS)
    num_tokens = 0
    for start in range(0, len(text), part_chars):
        caller.check()
        part = text[start : start + part_chars]
        num_tokens += len(model.tokenizer.encode(part, add_special_tokens=False))
        if num_tokens > (limit + 1) * CERTAINTY:
            break
    return num_tokens

"""What `LLM` takes and returns, with the names that other engines use."""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxserve.errors import InvalidRequestError
from jaxserve.front.outputs import Delta
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token; rank 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
      index: 0 to n - 1.
      text: without the token or text that ended it, unless that was asked for.
      token_ids: with the token that ended it.
      logprobs: for each token, the sampled and the most likely ones by id; None if not asked for.
      finish_reason: "stop", "length" or "abort".
      stop_reason: the stop string or stop id that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class LLMOutput:
    """What became of one prompt.

    Attributes:
      prompt: the text, or None if the prompt was given as ids.
      prompt_token_ids: its tokens.
      outputs: the answers, ``n`` of them.
      num_cached_tokens: tokens of the prompt that did not have to be computed.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One prompt or several as a list of texts and id lists. Raises InvalidRequestError."""
    if isinstance(given, str | Mapping) or (len(given) > 0 and _is_int(given[0])):
        return [_as_prompt(given)]
    return [_as_prompt(prompt) for prompt in given]


def _as_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        prompt = (
            prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        )
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(map(_is_int, prompt)):
        return [operator.index(token_id) for token_id in prompt]
    raise InvalidRequestError(
        "a prompt must be a text, a list of token ids, {'prompt': text} or "
        f"{{'prompt_token_ids': ids}}, got {type(prompt).__name__}",
        param="prompt",
    )


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


async def collect(
    deltas: AsyncGenerator[Delta, None], output: LLMOutput, tokenizer: Tokenizer
) -> LLMOutput:
    """Fills ``output`` with what its answers become, and returns it."""
    texts: list[list[str]] = [[] for _ in output.outputs]
    async with aclosing(deltas):
        async for delta in deltas:
            answer = output.outputs[delta.index]
            texts[delta.index].append(delta.text)
            answer.token_ids += delta.token_ids
            if delta.logprobs is not None:
                answer.logprobs = answer.logprobs or []
                answer.logprobs += [_by_id(entry, tokenizer) for entry in delta.logprobs]
            answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.index == 0:
                output.num_cached_tokens = delta.num_cached_tokens
    for answer, pieces in zip(output.outputs, texts, strict=True):
        answer.text = "".join(pieces)
    return output


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The sampled token first. It may be among the most likely ones too, with the same rank."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    by_id: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        by_id.setdefault(token_id, Logprob(logprob, rank, text))
    return by_id

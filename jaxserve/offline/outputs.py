"""The prompts that `LLM` takes and the outputs that it returns, with fields named as in vLLM."""

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
"""A string, token IDs, ``{"prompt": string}`` or ``{"prompt_token_ids": ids}``."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token. The most likely token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: 0 to n - 1.
      text: the text, without the stop string or stop token unless the request includes it.
      token_ids: the generated tokens, including the token that ended the completion.
      logprobs: for each token, the sampled and the most likely tokens by ID; None if not requested.
      finish_reason: "stop", "length" or "abort".
      stop_reason: the stop string or stop ID that ended the completion.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class LLMOutput:
    """A prompt and its completions.

    Attributes:
      prompt: the string, or None if the prompt was given as token IDs.
      prompt_token_ids: the tokens of the prompt.
      outputs: the ``n`` completions of the prompt.
      num_cached_tokens: tokens of the prompt that came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Returns prompts as a list of strings and ID lists. Raises InvalidRequestError."""
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
        "a prompt must be a string, a list of token ids, {'prompt': string} or "
        f"{{'prompt_token_ids': ids}}, got {type(prompt).__name__}",
        param="prompt",
    )


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


async def collect(
    deltas: AsyncGenerator[Delta, None], output: LLMOutput, tokenizer: Tokenizer
) -> LLMOutput:
    """Fills ``output`` with the completions that ``deltas`` describe, and returns it."""
    texts: list[list[str]] = [[] for _ in output.outputs]
    async with aclosing(deltas):
        async for delta in deltas:
            completion = output.outputs[delta.index]
            texts[delta.index].append(delta.text)
            completion.token_ids += delta.token_ids
            if delta.logprobs is not None:
                completion.logprobs = completion.logprobs or []
                completion.logprobs += [_by_id(entry, tokenizer) for entry in delta.logprobs]
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            if delta.index == 0:
                output.num_cached_tokens = delta.num_cached_tokens
    for completion, pieces in zip(output.outputs, texts, strict=True):
        completion.text = "".join(pieces)
    return output


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Returns the tokens at one position by ID: the sampled one, then the most likely others."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    by_id: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        by_id.setdefault(token_id, Logprob(logprob, rank, text))
    return by_id

"""Turns the fields of a request into `SamplingParams` and refuses fields that are not supported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.parameters import checked_arguments
from jaxserve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_N,
    Grammar,
    SamplingParams,
    check_ids,
    logprobs_within,
)

MAX_STOP_CHARS = 1000
"""Longest stop string: each may be searched for at every token."""

MAX_SALT_CHARS = 1000

MAX_TEXT_TOKENS = 2**20
"""The most tokens of any text that is encoded, whatever the context."""

MAX_BAD_WORD_CHARS = 1000
"""Longest bad word; `MAX_BAD_WORD_TOKENS` limits it once more after encoding."""

_NOT_IN_INTEGERS = frozenset(".eE")
"""Characters of other numbers, which msgspec would convert if they are whole."""

TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]

SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("detokenize", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields that a request and `SamplingParams` have under the same name."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    """Returns a test for exactly these values; 0 is not False."""
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


_never = _one_of()

UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "audio": _never,
        "chat_template": _never,
        "documents": _one_of([]),
        "function_call": _one_of("none", "auto"),
        "functions": _one_of([]),
        "logprob_token_ids": _never,
        "modalities": _one_of(["text"]),
        "suffix": _one_of(""),
        "use_beam_search": _one_of(False),
        "web_search_options": _never,
    }
)
"""The fields of unsupported features, and a test for values (besides null) that request nothing."""

REPLACEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "chat_template": "chat_template_kwargs, or start the server with --chat-template FILE",
        "function_call": "tool_choice",
        "functions": "tools",
    }
)
"""Replacements for some of these fields."""


def check_fields(request: GenerationRequest) -> None:
    """Validates the fields that do not become `SamplingParams`.

    Raises:
      InvalidRequestError: a field requests an unsupported feature, or two fields conflict.
    """
    for name, requests_nothing in UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and not requests_nothing(value):
            instead = f"; use {REPLACEMENTS[name]}" if name in REPLACEMENTS else ""
            raise InvalidRequestError(f"{name} is not supported{instead}", param=name)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError(
            f"best_of must be equal to n ({request.n or 1}): completions are not ranked; got "
            f"{request.best_of}",
            param="best_of",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            "prompt_logprobs is not allowed when stream is true", param="prompt_logprobs"
        )
    check_prompt_fields(request.cache_salt, request.truncate_prompt_tokens)


def check_prompt_fields(salt: str | None, keep: int | None) -> None:
    """Validates ``cache_salt`` and ``truncate_prompt_tokens``. Raises InvalidRequestError."""
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(salt)}",
            param="cache_salt",
        )
    if keep is not None and keep < 1 and keep != -1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got {keep}",
            param="truncate_prompt_tokens",
        )


def completion_params(
    request: CompletionRequest,
    model: ServedModel,
    *,
    grammar: Grammar | None,
    bad_words: TokenSequences,
) -> SamplingParams:
    """Returns the parameters of a completion. Raises InvalidRequestError.

    With ``max_tokens`` 0, a request only scores its prompt: the engine generates one token, which
    the reply does not show. ``grammar`` and ``bad_words`` are as in `chat_params`.
    """
    values: dict[str, Any] = {"grammar": grammar, "bad_words_token_ids": bad_words}
    if requested_tokens(request) == 0:
        values |= {"max_tokens": 1, "min_tokens": 0}
    values["logprobs"] = logprobs = _num_logprobs(request.logprobs, model, "logprobs")
    if request.echo and logprobs is not None:
        num_for_prompt = _num_logprobs(request.prompt_logprobs, model, "prompt_logprobs")
        values["prompt_logprobs"] = max(logprobs, num_for_prompt or 0)
    return _params(request, model, values)


def chat_params(
    request: ChatRequest,
    model: ServedModel,
    *,
    grammar: Grammar | None,
    bad_words: TokenSequences,
    show_special_tokens: bool = False,
) -> SamplingParams:
    """Returns the parameters of a chat completion. Raises InvalidRequestError.

    Args:
      request: the body.
      model: the model that runs the request.
      grammar: the grammar that the text must match, or None.
      bad_words: token sequences that must not appear.
      show_special_tokens: decode special tokens for a parser, whatever the request says.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = _num_logprobs(request.top_logprobs or 0, model, "top_logprobs")
    values: dict[str, Any] = {"grammar": grammar, "bad_words_token_ids": bad_words}
    values["logprobs"] = logprobs if request.logprobs else None
    if show_special_tokens:
        values["skip_special_tokens"] = False
    return _params(request, model, values)


def _num_logprobs(count: int | None, model: ServedModel, param: str) -> int | None:
    """Checks a number of log probabilities, and replaces -1 by the size of the vocabulary."""
    if count is None:
        return None
    return logprobs_within(count, model.ready.max_logprobs, model.vocab_size, param=param)


def num_completions(request: GenerationRequest) -> int:
    """Returns how many completions of each prompt are requested. Raises InvalidRequestError."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {n}", param="n")
    return n


def requested_tokens(request: GenerationRequest) -> int | None:
    """Returns the requested length of a completion, or None."""
    asked = request.max_completion_tokens
    return request.max_tokens if asked is None else asked


def length_field(request: GenerationRequest) -> str:
    """Returns the name of the field that holds the requested length."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def _params(
    request: GenerationRequest, model: ServedModel, overrides: Mapping[str, Any]
) -> SamplingParams:
    """Merges the model's defaults, the fields of the request and ``overrides``; the last wins."""
    values: dict[str, Any] = dict(model.defaults.sampling)
    asked = {name: getattr(request, name) for name in SAME_NAME}
    values |= {name: value for name, value in asked.items() if value is not None}
    values["stop"] = _stop_strings(request.stop)
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["prompt_logprobs"] = _num_logprobs(request.prompt_logprobs, model, "prompt_logprobs")
    values["logit_bias"] = _logit_bias(request.logit_bias, model.vocab_size)
    if request.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    values["extra_args"] = checked_arguments(
        request.vllm_xargs, model.ready.parameters, model.vocab_size, field="vllm_xargs"
    )
    values["max_tokens"] = requested_tokens(request)
    try:
        return SamplingParams(**{**values, **overrides})
    except InvalidRequestError as error:
        # Name the field that the client sent, not the parameter that it became.
        sent = length_field(request)
        message = re.sub(r"\bmax_tokens\b", sent, error.message)
        param = sent if error.param == "max_tokens" else error.param
        raise InvalidRequestError(message, param=param) from error


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Returns the biases by token ID.

    The IDs are checked before they are the keys of a dict: other integers can be chosen so that
    they collide in it, and then even a small body takes long to decode.
    """
    if not bias:
        return None
    message = "logit_bias: its keys: Expected int, got str"
    if not _NOT_IN_INTEGERS.isdisjoint("".join(bias)):
        raise InvalidRequestError(message, param="logit_bias")
    try:
        ids = msgspec.convert(list(bias), list[int], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(message, param="logit_bias") from error
    check_ids(ids, vocab_size, param="logit_bias")
    return dict(zip(ids, bias.values(), strict=True))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop strings must have at most {MAX_STOP_CHARS} characters, got {longest}",
            param="stop",
        )
    return texts


async def encode_bad_words(text_engine: TextEngine, words: list[str] | None) -> TokenSequences:
    """Returns the token IDs of each word in two forms: at the start of a text, and after a space.

    Raises:
      InvalidRequestError: too many words, or a word that is blank or too long.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words: at most {MAX_BAD_WORDS} words, got {len(words)}", param="bad_words"
        )
    longest = max(map(len, words))
    if longest > MAX_BAD_WORD_CHARS:
        raise InvalidRequestError(
            f"bad_words must have at most {MAX_BAD_WORD_CHARS} characters each, got {longest}",
            param="bad_words",
        )
    if not all(word.strip() for word in words):
        raise InvalidRequestError("bad_words must not have blank words", param="bad_words")
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    ids = await text_engine.encode_batch(
        forms, add_special_tokens=False, param="bad_words", most_tokens=MAX_TEXT_TOKENS
    )
    return tuple(dict.fromkeys(tuple(word) for word in ids))

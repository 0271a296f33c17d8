"""From the fields of a request to `SamplingParams`, and what is refused because it is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.ipc.messages import Ready
from jaxserve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxserve.sampling_params import SamplingParams, logprobs_within

MAX_STOP_CHARS = 1000
"""Longest stop string; each may be searched for at every token."""

MAX_SALT_CHARS = 1000

SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("detokenize", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields of a request that are fields of `SamplingParams` as they stand."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


_never = _one_of()

NO_OP: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
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
"""Features that are not here, and the values (besides null) that do not ask for them."""

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "chat_template": "chat_template_kwargs, or start the server with --chat-template FILE",
        "function_call": "tool_choice",
        "functions": "tools",
    }
)
"""What does the same."""


def check_fields(request: GenerationRequest) -> None:
    """Checks what is no sampling parameter.

    Raises:
      InvalidRequestError: a field asks for something that is not here, or two do not fit together.
    """
    for name, is_no_op in NO_OP.items():
        value = getattr(request, name, None)
        if value is not None and not is_no_op(value):
            instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
            raise InvalidRequestError(f"{name} is not supported{instead}", param=name)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError(
            f"best_of must be equal to n ({request.n or 1}): answers are not ranked; got "
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
    """Checks ``cache_salt`` and ``truncate_prompt_tokens``. Raises InvalidRequestError."""
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(salt)}",
            param="cache_salt",
        )
    if keep is not None and keep < 1 and keep != -1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {keep}",
            param="truncate_prompt_tokens",
        )


def completion_params(
    request: CompletionRequest, defaults: GenerationDefaults, ready: Ready
) -> SamplingParams:
    """The parameters of a completion. Raises InvalidRequestError.

    With ``max_tokens`` 0 one token is generated, for nobody to see: that is how a prompt is scored.
    """
    values: dict[str, Any] = {}
    if asked_tokens(request) == 0:
        values |= {"max_tokens": 1, "min_tokens": 0}
    logprobs = _count(request.logprobs, ready, "logprobs")
    if request.echo and logprobs is not None:
        of_prompt = _count(request.prompt_logprobs, ready, "prompt_logprobs")
        values["prompt_logprobs"] = max(logprobs, of_prompt or 0)
    return _params(request, defaults, ready, logprobs, values)


def chat_params(request: ChatRequest, defaults: GenerationDefaults, ready: Ready) -> SamplingParams:
    """The parameters of a chat completion. Raises InvalidRequestError."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = _count(request.top_logprobs or 0, ready, "top_logprobs")
    return _params(request, defaults, ready, logprobs if request.logprobs else None, {})


def _count(count: int | None, ready: Ready, param: str) -> int | None:
    if count is None:
        return None
    return logprobs_within(count, ready.max_logprobs, ready.vocab_size, param=param)


def asked_tokens(request: GenerationRequest) -> int | None:
    """The length of an answer that was asked for."""
    asked = request.max_completion_tokens
    return request.max_tokens if asked is None else asked


def length_field(request: GenerationRequest) -> str:
    """The field in which it was asked for."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def _params(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    ready: Ready,
    logprobs: int | None,
    overrides: dict[str, Any],
) -> SamplingParams:
    values: dict[str, Any] = dict(defaults.sampling)
    asked = {name: getattr(request, name) for name in SAME_NAME}
    values |= {name: value for name, value in asked.items() if value is not None}
    values["stop"] = _stop_texts(request.stop)
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["logprobs"] = logprobs
    values["prompt_logprobs"] = _count(request.prompt_logprobs, ready, "prompt_logprobs")
    values["logit_bias"] = request.logit_bias or None
    if request.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    values["max_tokens"] = asked_tokens(request)
    try:
        return SamplingParams(**values | overrides)
    except InvalidRequestError as error:
        # Blame the field that the client sent, not the one that it became.
        sent = length_field(request)
        message = re.sub(r"\bmax_tokens\b", sent, error.message)
        param = sent if error.param == "max_tokens" else error.param
        raise InvalidRequestError(message, param=param) from error


def _stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop strings must have at most {MAX_STOP_CHARS} characters, got {longest}",
            param="stop",
        )
    return texts

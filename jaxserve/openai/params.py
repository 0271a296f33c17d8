"""From the fields of a request to `SamplingParams`, and what is refused because it is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.generation_defaults import GenerationDefaults
from jaxserve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxserve.sampling_params import SamplingParams

MAX_STOP_CHARS = 1000
"""Longest stop text; each may be searched for at every token."""

SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields of a request that are fields of `SamplingParams` as they stand."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


_never = _one_of()

NO_OP: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "allowed_token_ids": _never,
        "audio": _never,
        "bad_words": _one_of([]),
        "best_of": _one_of(1),
        "cache_salt": _never,
        "chat_template": _never,
        "detokenize": _one_of(True),
        "documents": _one_of([]),
        "function_call": _one_of("none", "auto"),
        "functions": _one_of([]),
        "guided_choice": _never,
        "guided_grammar": _never,
        "guided_json": _never,
        "guided_regex": _never,
        "logit_bias": _one_of({}),
        "logprob_token_ids": _never,
        "modalities": _one_of(["text"]),
        "prompt_logprobs": _never,
        "response_format": _one_of({"type": "text"}),
        "return_token_ids": _one_of(False),
        "return_tokens_as_token_ids": _one_of(False),
        "structured_outputs": _never,
        "suffix": _one_of(""),
        "truncate_prompt_tokens": _never,
        "use_beam_search": _one_of(False),
        "web_search_options": _never,
    }
)
"""Features that are not here, and the values (besides null) that do not ask for them."""


def check_supported(request: GenerationRequest) -> None:
    """Raises InvalidRequestError for a field that asks for something that is not here."""
    for name, is_no_op in NO_OP.items():
        value = getattr(request, name, None)
        if value is not None and not is_no_op(value):
            raise InvalidRequestError(f"{name} is not supported yet", param=name)
    if request.best_of is not None and (request.n or 1) > 1:
        raise InvalidRequestError("best_of with n > 1 is not supported yet", param="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


def completion_params(request: CompletionRequest, defaults: GenerationDefaults) -> SamplingParams:
    """The parameters of a completion. Raises InvalidRequestError."""
    return _params(request, defaults, request.logprobs, renamed={})


def chat_params(request: ChatRequest, defaults: GenerationDefaults) -> SamplingParams:
    """The parameters of a chat completion. Raises InvalidRequestError."""
    if request.echo is not None and request.echo is not False:
        raise InvalidRequestError("echo is not supported yet for chats", param="echo")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, defaults, logprobs, renamed={"logprobs": "top_logprobs"})


def _params(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    logprobs: int | None,
    renamed: dict[str, str],
) -> SamplingParams:
    values: dict[str, Any] = dict(defaults.sampling)
    asked = {name: getattr(request, name) for name in SAME_NAME}
    values |= {name: value for name, value in asked.items() if value is not None}
    values["stop"] = _stop_texts(request.stop)
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["logprobs"] = logprobs
    values["max_tokens"] = request.max_tokens
    if request.max_completion_tokens is not None:
        values["max_tokens"] = request.max_completion_tokens
        renamed = renamed | {"max_tokens": "max_completion_tokens"}
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        # Blame the field that the client sent, not the one that it became.
        sent = renamed.get(error.param or "")
        if sent is None:
            raise
        message = error.message.replace(str(error.param), sent, 1)
        raise InvalidRequestError(message, param=sent) from error


def _stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop texts must have at most {MAX_STOP_CHARS} characters, got {longest}", param="stop"
        )
    return texts

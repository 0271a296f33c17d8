"""The inputs of an `LLM`: prompts, conversations and sampling parameters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxserve.conversion import plain
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A string, token IDs, ``{"prompt": string}`` or ``{"prompt_token_ids": ids}``."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Iterable[SamplingParams] | None

_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids"})


def as_prompts(given: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """Returns prompts as a list of strings and lists of IDs.

    Takes any iterable, once, and arrays of any library: one axis is a prompt, two are several.

    Raises:
      InvalidRequestError: this is no prompt, or one of the prompts is not valid.
    """
    if isinstance(given, str | Mapping):
        return [_as_prompt(given, "prompts")]
    prompts = _as_list(given)
    if prompts is None:
        raise _error("prompts", "a prompt or a list of prompts", given)
    if prompts and _is_int(prompts[0]):
        return [_as_prompt(prompts, "prompts")]
    return [_as_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def _as_prompt(given: Any, place: str) -> str | list[int]:
    prompt = given
    if isinstance(given, Mapping):
        if not given or not given.keys() <= _PROMPT_KEYS:
            keys = ", ".join(map(str, given)) or "no key"
            raise _error(place, "a dict with the key 'prompt' or 'prompt_token_ids'", keys)
        prompt = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise _error(place, "text without lone surrogates", f"{error}") from error
        return prompt
    ids = _as_list(prompt)
    if ids is None or not all(map(_is_int, ids)):
        forms = "a string, a list of token IDs, {'prompt': string} or {'prompt_token_ids': ids}"
        raise _error(place, forms, given)
    return [operator.index(token_id) for token_id in ids]


def as_conversations(given: Messages | Iterable[Messages]) -> list[list[dict[str, Any]]]:
    """Returns conversations as lists of messages. The adapter of the API checks the messages.

    Raises:
      InvalidRequestError: this is neither a list of messages nor a list of such lists.
    """
    found = None if isinstance(given, Mapping) else _as_list(given)
    if found is None:
        raise _error("messages", "a list of messages or a list of such lists", given)
    is_one = not found or isinstance(found[0], Mapping)
    conversations = []
    for i, conversation in enumerate([found] if is_one else found):
        place = "messages" if is_one else f"messages[{i}]"
        messages = _as_list(conversation)
        if messages is None or not all(isinstance(message, Mapping) for message in messages):
            raise _error(place, "a list of dicts with a role and a content", conversation)
        conversations.append([dict(message) for message in messages])
    return conversations


def as_tools(given: Iterable[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Returns the tools that a chat template shows. Raises InvalidRequestError."""
    tools = [] if given is None else _as_list(given)
    if tools is None or not all(isinstance(tool, Mapping) for tool in tools):
        raise _error("tools", "a list of dicts", given)
    return tools


def as_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the variables for a chat template. Raises InvalidRequestError."""
    variables = {} if given is None else given
    if not isinstance(variables, Mapping):
        raise _error("chat_template_kwargs", "a dict", given)
    for name in variables:
        if not isinstance(name, str):
            raise _error("chat_template_kwargs", "a dict whose keys are strings", name)
    return dict(variables)


def as_params(given: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each of ``count`` prompts; ``given`` None: the default.

    Raises:
      InvalidRequestError: a value is not `SamplingParams`, or there is another number of them.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    params = None if isinstance(given, Mapping) else _as_list(given)
    for i, one in enumerate([given] if params is None else params):
        if not isinstance(one, SamplingParams):
            place = "sampling_params" if params is None else f"sampling_params[{i}]"
            raise _error(place, "SamplingParams, such as SamplingParams(max_tokens=16)", one)
    assert params is not None
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params must be one object or a list of {count}, one for each prompt; got "
            f"{len(params)}",
            param="sampling_params",
        )
    return params


def _as_list(value: Any) -> list[Any] | None:
    """Returns the items of an iterable, or of an array as Python values; None for other values."""
    if hasattr(value, "tolist"):
        value = plain(value)
    is_collection = isinstance(value, Iterable) and not isinstance(
        value, str | bytes | bytearray | Mapping
    )
    return list(value) if is_collection else None


def _is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _error(place: str, expected: str, got: Any) -> InvalidRequestError:
    shown = got if isinstance(got, str) else type(got).__name__
    param = place.partition("[")[0]
    param = "prompt" if param == "prompts" else param
    return InvalidRequestError(f"{place} must be {expected}, got {shown:.200}", param=param)

"""The prompts of a request: strings, token IDs, or messages rendered with the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import INLINE_CHARS, TextEngine
from jaxserve.openai.decoding import json_type, with_integers, wrong_type
from jaxserve.openai.messages import template_messages
from jaxserve.openai.params import requested_tokens
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.text.chat_template import render_chat

MAX_PROMPTS = 2048
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("special_tokens", "tokenize"),
    }
)
"""Names that chat_template_kwargs must not set: they belong to the renderer."""

Prompt = str | list[int]

_FORMS = "a string, a list of token ids, or a list of either"


class ChatPrompt(Protocol):
    """The fields of a request that make a chat prompt."""

    @property
    def messages(self) -> list[dict[str, Any]] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def completion_prompts(value: Any, *, param: str = "prompt") -> list[Prompt]:
    """Returns the prompts in the field ``param``. Raises InvalidRequestError, which names it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        given = "nothing" if value is None else json_type(value)
        raise InvalidRequestError(f"{param} must be {_FORMS}, got {given}", param=param)
    if not value:
        raise InvalidRequestError(f"{param} cannot be empty", param=param)
    first = json_type(value[0])
    if first in ("int", "float"):
        return [_convert(value, list[int], param)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"{param}: at most {MAX_PROMPTS} prompts in a request, got {len(value)}", param=param
        )
    if first == "str":
        return _convert(value, list[str], param)
    if first == "array":
        return _convert(value, list[list[int]], param)
    raise InvalidRequestError(f"{param} must be {_FORMS}, got a list of {first}", param=param)


def _convert(value: list, form: Any, param: str) -> Any:
    try:
        return msgspec.convert(with_integers(value, form), form)
    except msgspec.ValidationError as error:
        place = wrong_type(error, form, under=param)
        raise InvalidRequestError(
            f"{param} must be {_FORMS}: {place.message}", param=param
        ) from error


async def encode_prompts(
    text_engine: TextEngine,
    prompts: list[Prompt],
    request: GenerationRequest,
    *,
    add_special_tokens: bool,
    param: str,
) -> list[list[int]]:
    """Returns the token IDs of prompts, cut at their start to ``truncate_prompt_tokens``.

    ``prompts`` holds strings only or token IDs only. Errors name the field ``param``.

    Raises:
      InvalidRequestError: a prompt is too long, or ``truncate_prompt_tokens`` exceeds the context.
    """
    return await encode_cut(
        text_engine,
        prompts,
        request.truncate_prompt_tokens,
        room=requested_tokens(request) or 1,
        add_special_tokens=add_special_tokens,
        param=param,
    )


async def encode_cut(
    text_engine: TextEngine,
    prompts: list[Prompt],
    keep: int | None,
    *,
    room: int,
    add_special_tokens: bool,
    param: str,
) -> list[list[int]]:
    """Returns the last ``keep`` token IDs of each prompt.

    ``keep`` None keeps every token; -1 keeps as many as leave ``room`` for a completion.

    Raises:
      InvalidRequestError: a prompt is too long, or ``keep`` exceeds the context.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        ids = await text_engine.encode_batch(
            texts,
            add_special_tokens=add_special_tokens,
            param=param,
            any_length=keep is not None,
        )
    if keep is None:
        return ids
    if keep > text_engine.model.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at most the context length of "
            f"{text_engine.model.max_model_len} tokens, got {keep}",
            param="truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(text_engine.model.max_model_len - room, 1)
    return [prompt[-keep:] for prompt in ids]


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if a variable for the template has a reserved name."""
    reserved = sorted(RESERVED_TEMPLATE_NAMES & variables.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs cannot set {', '.join(reserved)}", param="chat_template_kwargs"
        )


async def render_prompt(
    model: ServedModel, request: ChatPrompt, *, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Renders the messages of a chat; the template shows ``tools`` to the model.

    Raises:
      InvalidRequestError: the messages are invalid, or the template refuses them.
    """
    template = model.template_for(with_tools=bool(tools))
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE"
        )
    messages = template_messages(request.messages, template)
    extra = {**model.template_variables, **(request.chat_template_kwargs or {})}
    check_variables(extra)
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if continues and adds_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant",
            param="continue_final_message",
        )

    def render() -> str:
        return render_chat(
            template,
            _open_end(messages) if continues else messages,
            add_generation_prompt=not continues and adds_prompt is not False,
            tools=tools or None,
            special_tokens=model.tokenizer.special_tokens,
            **extra,
        )

    # Of other keys, such as tool_calls, the length is not known.
    is_plain = not extra and not tools and all(m.keys() <= {"role", "content"} for m in messages)
    is_short = sum(len(message["content"]) for message in messages) <= INLINE_CHARS
    text = render() if is_plain and is_short else await asyncio.to_thread(render)
    return _cut_at_open_end(text) if continues else text


# Marks the end of the message to continue. All text that the template writes after the mark is cut
# off. Templates that trim messages cannot trim the white space before the mark.
_OPEN_END = "\ue000open-end\ue000"


def _open_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + _OPEN_END}]


def _cut_at_open_end(text: str) -> str:
    if _OPEN_END not in text:
        raise InvalidRequestError(
            "the chat template does not show the message that is to be continued",
            param="continue_final_message",
        )
    return text[: text.index(_OPEN_END)]

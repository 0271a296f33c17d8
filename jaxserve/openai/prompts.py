"""The prompts of a request: strings, token IDs, or messages rendered with the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxserve.errors import InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import INLINE_CHARS, TextEngine
from jaxserve.openai.messages import MAX_MESSAGES, template_messages
from jaxserve.openai.params import MAX_TEXT_TOKENS, requested_tokens
from jaxserve.openai.prompt_list import Prompt
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.text.chat_template import render_chat
from jaxserve.text.json_size import size_of

TEXT_FACTOR = 4
"""A text that is cut to ``truncate_prompt_tokens``, and one for /tokenize or /detokenize, may have
this many times the tokens of the context, and at most `MAX_TEXT_TOKENS`."""

MAX_SHORT = 100
"""Requests with more messages than this are never short."""

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("special_tokens", "tokenize"),
    }
)
"""Names that chat_template_kwargs must not set: they belong to the renderer."""


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
            most_tokens=None if keep is None else most_text_tokens(text_engine.model),
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


def most_text_tokens(model: ServedModel) -> int:
    """Returns the most tokens of a text that need not fit the context, because it is cut or only
    counted."""
    return min(TEXT_FACTOR * model.max_model_len, MAX_TEXT_TOKENS)


async def render_prompt(
    text_engine: TextEngine, request: ChatPrompt, *, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Renders the messages of a chat; the template shows ``tools`` to the model.

    Raises:
      InvalidRequestError: the messages are invalid, or the template refuses them.
    """
    messages = request.messages or ()
    # How long a template works on other keys, such as tool_calls, or on variables, is not known.
    is_plain = not (request.chat_template_kwargs or text_engine.model.template_variables or tools)
    is_plain = is_plain and all(m.keys() <= {"role", "content"} for m in messages[:MAX_SHORT])
    size = size_of(messages, MAX_MESSAGES) + size_of(tools, MAX_MESSAGES)
    return await text_engine.render(
        lambda: _render(text_engine.model, request, tools),
        size=size if is_plain else max(size, INLINE_CHARS + 1),
    )


def _render(model: ServedModel, request: ChatPrompt, tools: Sequence[Mapping[str, Any]]) -> str:
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

    text = render_chat(
        template,
        _open_end(messages) if continues else messages,
        add_generation_prompt=not continues and adds_prompt is not False,
        tools=tools or None,
        special_tokens=model.tokenizer.special_tokens,
        **extra,
    )
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

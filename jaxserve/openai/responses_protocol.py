"""The JSON of /v1/responses as structs: the request, the items of an answer, and events."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.openai.protocol import GenerationRequest, ReasoningEffort, TopLogprob


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much to think."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the text; ``format`` is judged in `responses_input`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest, kw_only=True, frozen=True):
    """Body of POST /v1/responses."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None

    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None


class TextLogprob(msgspec.Struct):
    """The token that was sampled, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TextLogprob] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """Text for the reader."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = msgspec.field(default_factory=list)


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """A think block."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText] = msgspec.field(default_factory=list)


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the model asks to be called."""

    id: str
    call_id: str
    name: str
    status: str = "in_progress"
    arguments: str = ""


Item = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class InputDetails(msgspec.Struct, frozen=True):
    """How much of the input was not computed again."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """How much of the output was thinking."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/responses. Nothing is stored, so nothing can be referred to later."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    model: str
    output: list[Item] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The response as it is now: created, in_progress, completed, incomplete or failed."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, kw_only=True):
    """An item begins (added) or ends (done)."""

    type: str
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(msgspec.Struct, kw_only=True):
    """The text of an item begins (added) or ends (done)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class TextEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """More text of a message or of reasoning (delta), or all of it (text)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = msgspec.field(default_factory=int)
    delta: str | None = None
    text: str | None = None
    logprobs: list[TextLogprob] | None = None


class ArgumentsEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """More arguments of a call (delta), or all of them (arguments)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | None = None
    name: str | None = None
    arguments: str | None = None


Event = ResponseEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent

"""The JSON of /v1/responses as structs: the request, the items of a response, and events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.openai.protocol import GenerationRequest, ReasoningEffort, TopLogprob


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Options for the think block of the model."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the text; `structured_output` checks ``format``."""

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
    """The sampled token, and the most likely tokens in its place."""

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
    """The text of a think block."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the assistant."""

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
    """A function call of the model; ``namespace`` is set if the function has one."""

    id: str
    call_id: str
    name: str
    status: str = "in_progress"
    arguments: str = ""
    namespace: str | UnsetType = UNSET


Item = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class InputDetails(msgspec.Struct, frozen=True):
    """Counts the tokens of the input that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Counts the tokens of the output that lie in think blocks."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/responses. The server stores no responses."""

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
    """Carries the current response. Its type ends with the stage, such as "created" or "failed"."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, kw_only=True):
    """An item starts (added) or ends (done)."""

    type: str
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(msgspec.Struct, kw_only=True):
    """The text of an item starts (added) or ends (done)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class TextEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of the text of a message or think block (delta), or the whole text (text)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = msgspec.field(default_factory=int)
    delta: str | None = None
    text: str | None = None
    logprobs: list[TextLogprob] | None = None


class ArgumentsEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of the arguments of a call (delta), or all of them (arguments)."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | None = None
    name: str | None = None
    arguments: str | None = None


Event = ResponseEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent

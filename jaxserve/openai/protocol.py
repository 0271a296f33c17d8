"""The JSON bodies of the OpenAI API as structs: requests, replies and the chunks of streams.

Unknown fields of a request are ignored, and null is the same as absent. No value is converted from
one type to another, except that 3.0 is an integer. The modules that read fields of type `Any` check
them: `prompts`, `tools`, `structured_output`, and `params`, which refuses unsupported features.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream: usage in a last chunk, or in every chunk if it is continuous."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The fields that all endpoints for generating text share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    best_of: int | None = None
    cache_salt: str | None = None
    logit_bias: dict[str, float] | None = None  # checked before any key becomes an int
    prompt_logprobs: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    vllm_xargs: dict[str, Any] | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None

    logprob_token_ids: Any = None
    use_beam_search: Any = None


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """Body of POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of POST /tokenize: a string, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, gc=False):
    """Counts the tokens of the prompts that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, gc=False):
    """Counts the tokens of the completions that lie in think blocks."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a request: each prompt counts once, each completion in full.

    ``completion_tokens_details`` is set if the completions are parsed.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of tokens: each list has one entry for each token.

    Offsets count characters from the start of the text. The first token of an echoed prompt has no
    log probabilities.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, gc=False):
    """A token of the prompt, or one of the most likely tokens in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each token of the prompt, keyed by token ID; the first is null."""


class CompletionChoice(msgspec.Struct, gc=False):
    """One completion, or its next piece in a stream. Unset fields were not requested."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Reply of POST /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(msgspec.Struct, gc=False):
    """One of the most likely tokens, its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, gc=False):
    """The sampled token, and the most likely tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, gc=False):
    """Log probabilities: one entry for each token."""

    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct, gc=False):
    """The function to call; ``arguments`` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, gc=False):
    """A tool call of the model."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """The whole message of a completion. Unset fields are left out of the JSON."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One completion; ``token_ids`` is set if the request asked for it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/chat/completions. The last two fields are set if requested."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """A piece of a tool call: its name first, then pieces of its arguments."""

    name: str | None = None
    arguments: str = msgspec.field(default_factory=str)  # present even if empty


class ToolCallDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """A piece of the tool call number ``index``; only the first piece has ID and type."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


class ChatDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """The next piece of a message; unset fields are left out of the JSON."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, gc=False):
    """The next piece of one completion; ``token_ids`` is set if the request asked for it."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One event of the stream of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None

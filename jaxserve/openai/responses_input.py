"""Converts a request to /v1/responses into a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.content import content_text, string_field
from jaxserve.openai.messages import MAX_MESSAGES
from jaxserve.openai.protocol import ChatRequest, GenerationRequest
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.openai.responses_tools import FunctionTool, function_tools, shown_name

WITH_LOGPROBS = "message.output_text.logprobs"
"""The value in ``include`` that adds log probabilities to the output."""

_PARTS: Mapping[str, str] = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""The types of parts in an item, with the field that holds the text of each."""

_CALLS: Mapping[str, tuple[str | None, str]] = {
    "function_call": ("name", "arguments"),
    "custom_tool_call": ("name", "input"),
    "mcp_call": ("name", "arguments"),
    "local_shell_call": (None, "action"),
    "shell_call": (None, "action"),
    "apply_patch_call": (None, "operation"),
}
"""The types of items that are calls, with the fields that hold their name and their arguments. A
call without a name has that of its type."""

_TEXT_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_OUTPUTS = (
    *_TEXT_OUTPUTS,
    *("local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
)
"""The types of items that are the output of a call. Those of tools of the API may be objects."""

_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Returns the equivalent chat request.

    Raises:
      InvalidRequestError: the input is invalid, or the request needs stored state.
    """
    for field in _STATEFUL:
        if getattr(request, field):
            raise InvalidRequestError(
                f"{field} is not supported: this server stores no responses; send the whole "
                "conversation in input",
                param=field,
            )
    if (request.n or 1) > 1:
        raise InvalidRequestError(f"n must be 1 for a response, got {request.n}", param="n")
    with_logprobs = bool(request.top_logprobs) or WITH_LOGPROBS in (request.include or ())
    tools = function_tools(request)
    shared = {name: getattr(request, name) for name in GenerationRequest.__struct_fields__}
    shared["response_format"] = _response_format(request)
    if request.max_output_tokens is not None:
        shared["max_completion_tokens"] = request.max_output_tokens
    return ChatRequest(
        **shared,
        messages=_messages(request),
        logprobs=with_logprobs or None,
        top_logprobs=request.top_logprobs if with_logprobs else None,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        tools=[tool.in_chat() for tool in tools] or None,
        tool_choice=_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls,
    )


def _tool_choice(value: Any, tools: Sequence[FunctionTool]) -> Any:
    """Returns ``tool_choice`` in the form of a chat, which nests a named function."""
    if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
        name, namespace = value["name"], value.get("namespace")
        if namespace is None:
            namespace = next((t.namespace for t in tools if t.definition.get("name") == name), None)
        return {"type": "function", "function": {"name": shown_name(name, namespace)}}
    return value


def _response_format(request: ResponsesRequest) -> Any:
    form = None if request.text is None else request.text.format
    if form is None:
        return request.response_format
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": form}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    given = request.input
    if not given:
        raise InvalidRequestError("input must be a string or a list of items", param="input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if len(given) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"input: at most {MAX_MESSAGES} items, got {len(given)}", param="input"
        )
    chat = _Chat()
    for i, item in enumerate(given):
        chat.add(item, f"input[{i}]")
    return _with_instructions(chat.messages, request.instructions)


def _with_instructions(
    messages: list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Joins the instructions and leading system messages: templates expect one system message."""
    texts = [instructions] if instructions else []
    num_system = 0
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        texts.append(message["content"])
        num_system += 1
    if num_system + bool(instructions) < 2:
        first = [{"role": "system", "content": instructions}] if instructions else []
        return [*first, *messages]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num_system:]]


class _Chat:
    """Converts items to messages. Reasoning and calls join a message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""

    def add(self, item: Any, path: str) -> None:
        given = item.get("type", "message") if isinstance(item, dict) else item
        kind = given if isinstance(given, str) and isinstance(item, dict) else None
        if kind == "message":
            self._add_message(item, path)
        elif kind == "reasoning":
            content = item.get("content") or item.get("summary") or []
            self._reasoning = content_text(content, f"{path}.content", _PARTS)
        elif kind == "item_reference":
            raise InvalidRequestError(
                f"{path}: this server stores no items to refer to; send the item", param=path
            )
        elif kind in _CALLS:
            self._add_call(item, path)
        elif kind in _OUTPUTS:
            output = item.get("output")
            if kind not in _TEXT_OUTPUTS:
                output = _as_text(output)
            self._add_output(string_field(item, "call_id", path), output, path)
        elif kind is None or "content" in item:
            raise InvalidRequestError(
                f"{path}: items must have type 'message', 'reasoning', 'function_call' or "
                f"'function_call_output', got {given!r:.50}",
                param=path,
            )
        # Items of other types belong to services that are not here, such as web_search_call.

    def _add_message(self, item: dict[str, Any], path: str) -> None:
        role = string_field(item, "role", path)
        content = content_text(item.get("content"), f"{path}.content", _PARTS)
        message = {"role": role, "content": content}
        if role == "assistant" and self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        name_field, arguments_field = _CALLS[item["type"]]
        name = item["type"].removesuffix("_call")
        if name_field is not None:
            name = shown_name(string_field(item, name_field, path), item.get("namespace"))
        arguments = item.get(arguments_field)
        if item["type"] == "custom_tool_call":
            arguments = {"input": arguments}
        has_only_id = item.get("call_id") is None and item.get("id") is not None
        call_id = string_field(item, "id" if has_only_id else "call_id", path)
        function = {"name": name, "arguments": arguments}
        last: dict[str, Any] = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = {"role": "assistant", "content": ""}
            if self._reasoning:
                last["reasoning_content"], self._reasoning = self._reasoning, ""
            self.messages.append(last)
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        if item["type"] == "mcp_call":  # the output is in the same item
            self._add_output(call_id, _as_text(item.get("output") or item.get("error")), path)

    def _add_output(self, call_id: str, output: Any, path: str) -> None:
        content = content_text(output, f"{path}.output", _PARTS)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _as_text(value: Any) -> str | None:
    """Returns a value as text: JSON unless it is a string."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def with_response_fields(
    error: InvalidRequestError, request: ResponsesRequest
) -> InvalidRequestError:
    """Returns an error of the chat request with the names that the fields have in ``request``."""
    message, param = error.message, error.param
    names = {}
    if request.max_output_tokens is not None:
        names["max_completion_tokens"] = "max_output_tokens"
    if request.text is not None and request.text.format is not None:
        names["response_format"] = "text.format"
    if param is not None and param.startswith("messages"):
        names["messages"] = "input"
    for name, own in names.items():
        message = re.sub(rf"\b{name}\b", own, message)
        if param is not None and re.match(rf"{name}\b", param):
            param = own
    if param is not None and param.startswith("tool"):
        message = message.replace("'function': {'name': ...}", "'name': ...")
        message, param = (re.sub(r"(tools\[\d+\])\.function", r"\1", x) for x in (message, param))
    return type(error)(message, param=param)

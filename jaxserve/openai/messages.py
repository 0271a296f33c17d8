"""The messages of a chat in the form that templates expect.

Clients send the history of a chat in many forms. Here a content becomes a string, the arguments of
an earlier call become an object, and an empty list of calls is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.content import CHAT_PARTS, content_text
from jaxserve.openai.decoding import json_type
from jaxserve.text.chat_template import REASONING_NAMES

MAX_MESSAGES = 10_000
MAX_ARGUMENT_CHARS = 2**19
"""Longest arguments of an earlier tool call: decoding them takes at most 20 ms."""

REASONING_PARTS = frozenset({"thinking", "reasoning", "redacted_thinking"})
"""The types of parts that hold earlier reasoning. Only the assistant may send them."""

_ASSISTANT_PARTS: Mapping[str, str] = {**CHAT_PARTS, "refusal": "refusal"}

_TEXT_NAMES = ("thinking", "reasoning", "text", "summary")
"""The fields that may hold the text of a part with reasoning; the first that is set counts."""


def template_messages(given: list[dict[str, Any]] | None, template: str) -> list[dict[str, Any]]:
    """Returns the messages of a request with clean contents and calls.

    Args:
      given: the messages as the client sent them.
      template: the source of the chat template. It decides whether "developer" stays a role.

    Raises:
      InvalidRequestError: there are no messages or too many, or one is invalid.
    """
    if not given:
        raise InvalidRequestError(
            "messages must be a list of at least one message", param="messages"
        )
    if len(given) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages: at most {MAX_MESSAGES}, got {len(given)}", param="messages"
        )
    return [_clean(message, f"messages[{i}]", template) for i, message in enumerate(given)]


def message_text(message: Mapping[str, Any], path: str) -> str:
    """Returns the text of a message, without earlier reasoning. Raises InvalidRequestError."""
    content = message.get("content")
    if message.get("role") != "assistant":
        return content_text(content, f"{path}.content")
    return content_text(content, f"{path}.content", _ASSISTANT_PARTS, skipped=REASONING_PARTS)


def _clean(message: dict[str, Any], path: str, template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{path}.role must be a string, such as 'user', got {role!r:.50}",
            param=f"{path}.role",
        )
    if role == "developer" and "developer" not in template:
        role = "system"
    clean = {**message, "role": role, "content": message_text(message, path)}
    reasoning = _reasoning(message)
    if reasoning and not any(message.get(name) for name in REASONING_NAMES):
        clean["reasoning_content"] = reasoning
    # Templates test whether there is a list of calls, not whether it holds any.
    calls = clean.pop("tool_calls", None)
    if calls is not None and calls != []:
        clean["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return clean


def _reasoning(message: Mapping[str, Any]) -> str:
    """Returns the text of the parts of a message that hold earlier reasoning."""
    content = message.get("content")
    parts = content if isinstance(content, list) and message["role"] == "assistant" else []
    texts = [_part_reasoning(part) for part in parts if part.get("type") in REASONING_PARTS]
    return "\n".join(text for text in texts if text)


def _part_reasoning(part: Mapping[str, Any]) -> str:
    """Returns the text of a part with reasoning: a string, or a list of pieces; "" if encrypted."""
    value = next((part[name] for name in _TEXT_NAMES if part.get(name)), "")
    pieces = value if isinstance(value, list) else [value]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Returns earlier calls with decoded arguments: clients send JSON, templates want values."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        given = json_type(calls) if not isinstance(calls, list) else "a list with other values"
        raise InvalidRequestError(f"{path} must be a list of objects, got {given}", param=path)
    clean = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict):
            arguments = _arguments(function.get("arguments"), f"{path}[{i}].function.arguments")
            call = {**call, "function": {**function, "arguments": arguments}}
        clean.append(call)
    return clean


def _arguments(value: Any, param: str) -> dict[str, Any]:
    """Returns the arguments of an earlier call as an object; no arguments are an empty one."""
    if isinstance(value, str):
        _check_length(value, param)
        try:
            value = msgspec.json.decode(value) if value.strip() else None
        # UnicodeEncodeError: lone surrogates, which a string of a Python program can have.
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"{param} must be the text of a JSON object: {error}", param=param
            ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{param} must be the text of a JSON object, got {json_type(value)}", param=param
        )
    return value


def _check_length(arguments: str, param: str) -> None:
    if len(arguments) > MAX_ARGUMENT_CHARS:
        raise InvalidRequestError(
            f"{param} must have at most {MAX_ARGUMENT_CHARS} characters, got {len(arguments)}",
            param=param,
        )

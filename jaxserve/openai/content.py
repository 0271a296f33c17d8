"""The content of messages and of items: a string, or a list of parts that hold text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import json_type

CHAT_PARTS: Mapping[str, str] = {"text": "text"}
"""The types of parts in /v1/chat/completions, with the field that holds the text of each."""


def content_text(content: Any, path: str, parts: Mapping[str, str] = CHAT_PARTS) -> str:
    """Returns the text of a message or an item; "" if ``content`` is None.

    Args:
      content: a string, a list of parts, or None.
      path: names the content in errors, as in ``messages[0].content``.
      parts: the types of parts that may occur, with the field that holds the text of each. The
        texts are joined with line breaks.

    Raises:
      InvalidRequestError: the content is invalid; ``param`` is the path of the wrong value.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of parts, got {json_type(content)}", param=path
        )
    return "\n".join(_part_text(part, f"{path}[{i}]", parts) for i, part in enumerate(content))


def _part_text(part: Any, path: str, parts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in parts:
        shown = f"{kind[:50]!r}" if isinstance(kind, str) else "no type"
        types = " or ".join(map(repr, parts))
        raise InvalidRequestError(f"{path}: parts must have type {types}, got {shown}", param=path)
    return string_field(part, parts[kind], path)


def string_field(value: Mapping[str, Any], name: str, path: str) -> str:
    """Returns the field ``name`` of the object at ``path``.

    Raises:
      InvalidRequestError: the field is missing or not a string.
    """
    field = value.get(name)
    if not isinstance(field, str):
        raise InvalidRequestError(
            f"{path}.{name} must be a string, got {json_type(field)}", param=f"{path}.{name}"
        )
    return field

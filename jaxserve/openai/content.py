"""The content of messages and of items: a string, or a list of parts that hold text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.decoding import json_type

CHAT_PARTS: Mapping[str, str] = {"text": "text"}
"""The types of parts in /v1/chat/completions, with the field that holds the text of each."""


def content_text(
    content: Any,
    path: str,
    parts: Mapping[str, str] = CHAT_PARTS,
    *,
    skipped: frozenset[str] = frozenset(),
) -> str:
    """Returns the text of a message or an item; "" if ``content`` is None.

    Args:
      content: a string, a list of parts, or None.
      path: names the content in errors, as in ``messages[0].content``.
      parts: the types of parts that may occur, with the field that holds the text of each. The
        texts are joined with line breaks.
      skipped: the types of parts that may occur and are left out.

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
    return "\n".join(
        _part_text(part, f"{path}[{i}]", parts)
        for i, part in enumerate(content)
        if _kind(part) not in skipped
    )


def joined(first: Any, second: Any) -> Any:
    """Returns two contents of messages as one; one of them may be None."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Any] = []
    for content in (first, second):
        if isinstance(content, list):
            parts += content
        elif content is not None:
            parts.append({"type": "text", "text": content})
    return parts


def _kind(part: Any) -> str | None:
    """Returns the type of a part, or None if it has none."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _part_text(part: Any, path: str, parts: Mapping[str, str]) -> str:
    kind = _kind(part)
    if kind is None or kind not in parts:
        shown = "no type" if kind is None else f"{kind[:50]!r}"
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

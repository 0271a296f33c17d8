"""What parsers say about an answer."""

from __future__ import annotations

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the text that is meant for the reader; never empty."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the text that the model thinks with; never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that began last, as JSON text; never empty."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments

"""The events of a completion, and the writer that collects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More content of the message; never empty."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More reasoning; never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a tool call. ``index`` counts the calls of a completion from 0."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More arguments of the call that began last, as JSON text; never empty."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class EventWriter:
    """Collects events, numbers the calls and joins neighbouring events of one type.

    Args:
      tools: names of the functions that can be called -> JSON schemas of their parameters. None:
        any function can be called.

    Attributes:
      num_calls: number of calls that have begun.
      num_complete_calls: number of calls whose arguments are complete.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self.num_calls = 0
        self.num_complete_calls = 0
        self._tools = tools
        self._events: list[Event] = []
        self._kind: type[ContentDelta | ReasoningDelta | ToolCallArguments] = ContentDelta
        self._texts: list[str] = []

    def knows(self, name: str) -> bool:
        """Returns True if a function of this name can be called."""
        return bool(name) if self._tools is None else name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Returns the JSON schema of the parameters of a function; empty if it has none."""
        return {} if self._tools is None else self._tools.get(name, {})

    def content(self, text: str) -> None:
        """Adds content."""
        self._write(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._write(ReasoningDelta, text)

    def arguments(self, text: str) -> None:
        """Adds arguments to the call that began last."""
        assert self.num_calls > 0
        self._write(ToolCallArguments, text)

    def start_call(self, name: str) -> None:
        """Begins a call."""
        self._close()
        self._events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def end_call(self) -> None:
        """Marks the call that began last as complete: its arguments are a whole JSON object."""
        self.num_complete_calls += 1

    def take(self) -> list[Event]:
        """Returns the events since the last call of this method."""
        self._close()
        events, self._events = self._events, []
        return events

    def _write(
        self, kind: type[ContentDelta | ReasoningDelta | ToolCallArguments], text: str
    ) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts = []
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        else:
            self._events.append(
                ReasoningDelta(text) if self._kind is ReasoningDelta else ContentDelta(text)
            )

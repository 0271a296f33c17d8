"""Gathers the events of one piece of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)


class EventWriter:
    """Numbers calls, and joins neighbouring events of a kind.

    ``tools`` are the names that can be called, with the JSON schemas of their parameters; with None
    every name can be.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self.num_calls = 0
        self.num_complete_calls = 0
        self._tools = tools
        self._events: list[Event] = []
        self._kind: type[ContentDelta | ReasoningDelta | ToolCallArguments] = ContentDelta
        self._texts: list[str] = []

    def knows(self, name: str) -> bool:
        """Whether a function of this name can be called."""
        return bool(name) if self._tools is None else name in self._tools

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a function's parameters; empty if there is none."""
        return {} if self._tools is None else self._tools.get(name, {})

    def content(self, text: str) -> None:
        self._write(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        self._write(ReasoningDelta, text)

    def arguments(self, text: str) -> None:
        """More arguments of the call that was started last."""
        assert self.num_calls > 0
        self._write(ToolCallArguments, text)

    def start_call(self, name: str) -> None:
        self._close()
        self._events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def end_call(self) -> None:
        """The arguments of the call that was started last are a whole JSON object."""
        self.num_complete_calls += 1

    def take(self) -> list[Event]:
        """The events since the last call of this."""
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

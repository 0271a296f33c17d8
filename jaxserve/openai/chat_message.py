"""Turns the deltas of a completion into pieces of a chat message, and the pieces into a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.front.outputs import Delta
from jaxserve.openai.protocol import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from jaxserve.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jaxserve.parsing.parser import MessageParser


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Turns the completions of one request into chat messages.

    Attributes:
      parsers: one for each completion; empty: all text is content.
      new_call_id: returns the ID of a new tool call.
      parallel: show every tool call, not only the first.
      with_reasoning: show reasoning.
    """

    parsers: tuple[MessageParser, ...] = ()
    new_call_id: Callable[[], str] = str
    parallel: bool = True
    with_reasoning: bool = True

    def pieces(self, delta: Delta) -> list[ChatDelta]:
        """Returns the pieces that a delta adds to its message, in order; there may be none."""
        if delta.events is None:
            return [ChatDelta(content=delta.text)] if delta.text else []
        return [piece for event in delta.events if (piece := self._piece(event)) is not None]

    def finish_reason(self, delta: Delta) -> str | None:
        """Returns the finish reason: "tool_calls" if a call is complete and nothing was cut off."""
        if delta.finish_reason == "stop" and self.parsers:
            return "tool_calls" if self.parsers[delta.index].num_complete_calls else "stop"
        return delta.finish_reason

    def _piece(self, event: Event) -> ChatDelta | None:
        if isinstance(event, ContentDelta):
            return ChatDelta(content=event.text)
        if isinstance(event, ReasoningDelta):
            if not self.with_reasoning:
                return None
            return ChatDelta(reasoning=event.text, reasoning_content=event.text)
        if event.index > 0 and not self.parallel:
            return None
        if isinstance(event, ToolCallStart):
            function = FunctionDelta(name=event.name, arguments="")
            call = ToolCallDelta(event.index, self.new_call_id(), "function", function)
        else:
            assert isinstance(event, ToolCallArguments)
            call = ToolCallDelta(event.index, function=FunctionDelta(arguments=event.text))
        return ChatDelta(tool_calls=[call])


PLAIN = MessageForm()
"""Shows all text as content."""


class MessageBuilder:
    """Joins the pieces of one message. ``prefixes`` are the start of its content."""

    def __init__(self, *prefixes: str) -> None:
        self._content = list(prefixes)
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, piece: ChatDelta) -> None:
        """Adds the next piece."""
        if piece.content is not None:
            self._content.append(piece.content)
        if piece.reasoning is not None:
            self._reasoning.append(piece.reasoning)
        for call in piece.tool_calls or ():
            if call.id is not None:
                assert call.function.name is not None
                self._calls.append((call.id, call.function.name, []))
            self._calls[call.index][2].append(call.function.arguments)

    def message(self) -> ChatMessage:
        """Returns the message. Its content is null if it has tool calls and no text."""
        content = "".join(self._content)
        message = ChatMessage(content if content or not self._calls else None)
        if self._reasoning:
            message.reasoning = message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.tool_calls = [
                ToolCall(call_id, FunctionCall(name, "".join(arguments)))
                for call_id, name, arguments in self._calls
            ]
        return message

"""Turns the pieces of a chat message into the items and events of /v1/responses."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import cast

from jaxserve.openai.protocol import ChatDelta, ChatLogprobs
from jaxserve.openai.responses_protocol import (
    ArgumentsEvent,
    CallItem,
    Event,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    TextEvent,
    TextLogprob,
)
from jaxserve.openai.responses_tools import FunctionTool


class ItemWriter:
    """Builds the items of one response, and the events that announce them.

    Only the last item can be open. Events are numbered from 0.

    Args:
      tools: the functions that have a namespace, by the names that the model sees.

    Attributes:
      items: the items so far.
    """

    def __init__(self, tools: Mapping[str, FunctionTool]) -> None:
        self._tools = tools
        self.items: list[Item] = []
        self._number = -1
        self._is_open = False
        self._texts: list[str] = []
        self._logprobs: list[TextLogprob] = []

    def response_event(self, kind: str, response: Response) -> ResponseEvent:
        """Returns an event that carries the response; ``kind`` is its type, as in "created"."""
        return ResponseEvent(
            type=f"response.{kind}", sequence_number=self._next(), response=response
        )

    def add(self, piece: ChatDelta, logprobs: ChatLogprobs | None) -> list[Event]:
        """Adds a piece of the message with the ``logprobs`` of its content; returns its events."""
        if piece.content is not None:
            events = self._open(MessageItem)
            return [*events, self._more_text(piece.content, logprobs)]
        if piece.reasoning is not None:
            events = self._open(ReasoningItem)
            return [*events, self._more_text(piece.reasoning, None)]
        events: list[Event] = []
        for call in piece.tool_calls or ():
            if call.id is not None:
                assert call.function.name is not None
                item = CallItem(_new_id("fc"), call.id, call.function.name)
                if tool := self._tools.get(item.name):
                    assert tool.namespace is not None
                    item.name, item.namespace = tool.definition["name"], tool.namespace
                events += [*self.close(), self._begin(item)]
            if call.function.arguments:
                self._texts.append(call.function.arguments)
                events.append(self._arguments("delta", delta=call.function.arguments))
        return events

    def end(self, status: str) -> list[Event]:
        """Ends the last item. A response without items gets an empty message."""
        events = [] if self.items else self._open(MessageItem)
        return [*events, *self.close(status)]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item, if any, and returns its last events."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item.status = status
        self._texts = []
        events: list[Event]
        if isinstance(item, CallItem):
            item.arguments = text
            events = [self._arguments("done", name=item.name, arguments=text)]
        else:
            item.content[0].text = text
            done = self._text("done", text=text)
            if isinstance(item, MessageItem):
                done.logprobs = item.content[0].logprobs = self._logprobs
                self._logprobs = []
            events = [done, self._part("done")]
        return [*events, self._item("done")]

    def _open(self, kind: type[MessageItem] | type[ReasoningItem]) -> list[Event]:
        """Opens an item of this kind unless one is open, and returns the events."""
        if self._is_open and isinstance(self.items[-1], kind):
            return []
        events = self.close()
        if kind is MessageItem:
            events.append(self._begin(MessageItem(_new_id("msg"))))
            part: OutputText | ReasoningText = OutputText()
        else:
            events.append(self._begin(ReasoningItem(_new_id("rs"))))
            part = ReasoningText()
        events.append(self._part("added", part))
        item = self.items[-1]
        assert not isinstance(item, CallItem)
        item.content = [part]  # type: ignore[assignment]
        return events

    def _begin(self, item: Item) -> Event:
        self.items.append(item)
        self._is_open = True
        return self._item("added")

    def _more_text(self, text: str, logprobs: ChatLogprobs | None) -> Event:
        self._texts.append(text)
        event = self._text("delta", delta=text)
        if isinstance(self.items[-1], MessageItem):
            more = [] if logprobs is None else logprobs.content
            # As JSON text, an entry has the same form here as in a chat completion.
            event.logprobs = cast(list[TextLogprob], more)
            self._logprobs += event.logprobs
        return event

    def _item(self, stage: str) -> ItemEvent:
        return ItemEvent(
            type=f"response.output_item.{stage}",
            sequence_number=self._next(),
            output_index=len(self.items) - 1,
            item=copy.copy(self.items[-1]),
        )

    def _part(self, stage: str, part: OutputText | ReasoningText | None = None) -> PartEvent:
        item = self.items[-1]
        assert not isinstance(item, CallItem)
        return PartEvent(
            type=f"response.content_part.{stage}",
            sequence_number=self._next(),
            item_id=item.id,
            output_index=len(self.items) - 1,
            part=copy.copy(part or item.content[0]),
        )

    def _text(self, stage: str, *, delta: str | None = None, text: str | None = None) -> TextEvent:
        item = self.items[-1]
        kind = "output_text" if isinstance(item, MessageItem) else "reasoning_text"
        return TextEvent(
            type=f"response.{kind}.{stage}",
            sequence_number=self._next(),
            item_id=item.id,
            output_index=len(self.items) - 1,
            delta=delta,
            text=text,
        )

    def _arguments(
        self,
        stage: str,
        *,
        delta: str | None = None,
        name: str | None = None,
        arguments: str | None = None,
    ) -> ArgumentsEvent:
        return ArgumentsEvent(
            type=f"response.function_call_arguments.{stage}",
            sequence_number=self._next(),
            item_id=self.items[-1].id,
            output_index=len(self.items) - 1,
            delta=delta,
            name=name,
            arguments=arguments,
        )

    def _next(self) -> int:
        self._number += 1
        return self._number


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"

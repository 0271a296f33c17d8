"""Parsers of one completion: for one format, or for a think block followed by content and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.parsing.events import ContentDelta, Event, EventWriter
from jaxserve.parsing.scanner import Reading, Scanner

Format = Callable[[Scanner], Reading[None]]
"""Reads a completion from beginning to end."""


class Parser:
    """Reads the text of one completion in one format.

    Args:
      format: the format of the text.
      tools: names of the functions that can be called -> JSON schemas of their parameters. A call
        of any other function is content. None: any function can be called.
      calls_only: the completion has no content. Text outside calls is the beginning of a call that
        was cut off, and is dropped.
    """

    def __init__(
        self,
        format: Format,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        calls_only: bool = False,
    ) -> None:
        self._calls_only = calls_only
        self._out = EventWriter(tools)
        self._scan = Scanner(self._out)
        self._reading = _read(format, self._scan)

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self._out.num_calls

    @property
    def num_complete_calls(self) -> int:
        """Number of calls whose arguments are complete."""
        return self._out.num_complete_calls

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is in a think block; its end tag counts as inside."""
        return self._scan.is_reasoning

    def push(self, text: str) -> list[Event]:
        """Adds text and returns the events that are certain now. Not allowed after `finish`."""
        self._scan.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """Ends the text and returns the events of the text that was held back."""
        self._scan.close()
        return self._run()

    def _run(self) -> list[Event]:
        next(self._reading, None)
        if self._scan.passes_arguments:
            self._scan.pass_arguments()
        events = self._out.take()
        if self._calls_only:
            return [event for event in events if not isinstance(event, ContentDelta)]
        return events


def _read(format: Format, scan: Scanner) -> Reading[None]:
    """Reads a completion, and releases all text that the format leaves unread."""
    yield from format(scan)
    if (yield from scan.more()):
        yield from scan.rest()
    scan.settle()


class MessageParser:
    """Reads a think block, and then content and calls.

    Args:
      reasoning: the parser of the think block; None: there is none.
      calls: the parser of the text after the think block; None: all of that text is content.
    """

    def __init__(self, reasoning: Parser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_complete_calls(self) -> int:
        """Number of calls whose arguments are complete."""
        return 0 if self._calls is None else self._calls.num_complete_calls

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is in a think block; its end tag counts as inside."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[Event]:
        """Adds text and returns the events that are certain now. Not allowed after `finish`."""
        if self._reasoning is not None:
            return self._pass_on(self._reasoning.push(text))
        return self._pass_on([ContentDelta(text)] if text else [])

    def finish(self) -> list[Event]:
        """Ends the text and returns the events of the text that was held back."""
        events = [] if self._reasoning is None else self._pass_on(self._reasoning.finish())
        return events if self._calls is None else events + self._calls.finish()

    def _pass_on(self, events: list[Event]) -> list[Event]:
        """Replaces content by the events that the parser of calls finds in it."""
        if self._calls is None:
            return events
        passed: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                passed += self._calls.push(event.text)
            else:
                passed.append(event)
        return passed

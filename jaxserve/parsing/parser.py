"""The parser of one answer, whatever the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.parsing.event_writer import EventWriter
from jaxserve.parsing.events import ContentDelta, Event
from jaxserve.parsing.scanner import Scanner, Steps

Format = Callable[[Scanner], Steps[None]]
"""Reads an answer from beginning to end."""


class Parser:
    """Runs a format over the text of one answer.

    Args:
      format: the form that the text is in.
      tools: the names that can be called -> JSON schemas of their parameters; text that would call
        another is content. None: any name can be called.
      calls_only: there is no content: what is no call is the beginning of one that was cut off.
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
        self._steps = _read(format, self._scan)

    @property
    def num_calls(self) -> int:
        """How many calls have been announced."""
        return self._out.num_calls

    @property
    def num_complete_calls(self) -> int:
        """How many calls have whole arguments."""
        return self._out.num_complete_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, or ends it."""
        return self._scan.is_reasoning

    def push(self, text: str) -> list[Event]:
        """The events that the next piece of text makes certain. Not to be called after `finish`."""
        self._scan.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The events of text that was held back until now: the answer has ended."""
        self._scan.close()
        return self._run()

    def _run(self) -> list[Event]:
        next(self._steps, None)
        if self._scan.passes_arguments:
            self._scan.pass_arguments()
        events = self._out.take()
        if self._calls_only:
            return [event for event in events if not isinstance(event, ContentDelta)]
        return events


def _read(format: Format, scan: Scanner) -> Steps[None]:
    yield from format(scan)
    if (yield from scan.more()):
        yield from scan.rest()
    scan.settle()

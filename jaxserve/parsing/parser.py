"""The parser of one answer, whatever the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.parsing.event_writer import EventWriter
from jaxserve.parsing.events import Event
from jaxserve.parsing.scanner import Scanner, Steps

Format = Callable[[Scanner], Steps[None]]
"""Reads an answer from beginning to end."""


class Parser:
    """Runs a format over the text of one answer.

    Args:
      format: the form that the text is in.
      tools: the names that can be called -> JSON schemas of their parameters; text that would call
        another is content. None: any name can be called.
    """

    def __init__(
        self, format: Format, *, tools: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
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
        self._run()
        return self._out.take()

    def finish(self) -> list[Event]:
        """The events of text that was held back until now: the answer has ended."""
        self._scan.close()
        self._run()
        return self._out.take()

    def _run(self) -> None:
        next(self._steps, None)
        if self._scan.passes_arguments:
            self._scan.pass_arguments()


def _read(format: Format, scan: Scanner) -> Steps[None]:
    yield from format(scan)
    if (yield from scan.more()):
        yield from scan.rest()
    scan.settle()

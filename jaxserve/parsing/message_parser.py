"""The parser of a whole answer: its think block, then content and calls."""

from __future__ import annotations

from jaxserve.parsing.events import ContentDelta, Event
from jaxserve.parsing.parser import Parser


class MessageParser:
    """Gives what is not reasoning to the parser of calls. Either parser may be None.

    Without both, all text is content.
    """

    def __init__(self, reasoning: Parser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_complete_calls(self) -> int:
        """How many calls have whole arguments."""
        return 0 if self._calls is None else self._calls.num_complete_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, or ends it."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[Event]:
        """The events that the next piece of text makes certain. Not to be called after `finish`."""
        if self._reasoning is not None:
            return self._pass_on(self._reasoning.push(text))
        return self._pass_on([ContentDelta(text)] if text else [])

    def finish(self) -> list[Event]:
        """The events of text that was held back until now: the answer has ended."""
        events = [] if self._reasoning is None else self._pass_on(self._reasoning.finish())
        return events if self._calls is None else events + self._calls.finish()

    def _pass_on(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        passed: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                passed += self._calls.push(event.text)
            else:
                passed.append(event)
        return passed

"""Functions that read completions in pieces and check the events of every stream."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from jaxserve.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jaxserve.parsing.parser import MessageParser, Parser


@dataclass
class Completion:
    """The joined events of a completion."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    num_complete: int = 0

    def add(self, event: Event) -> None:
        if isinstance(event, ToolCallStart):
            assert event.name
            assert event.index == len(self.calls)
            self.calls.append((event.name, ""))
            return
        assert event.text
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        else:
            assert isinstance(event, ToolCallArguments)
            assert event.index == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + event.text)


def read_pieces(parser: Parser | MessageParser, *pieces: str) -> Completion:
    completion = Completion()
    for piece in pieces:
        for event in parser.push(piece):
            completion.add(event)
    for event in parser.finish():
        completion.add(event)
    completion.num_complete = parser.num_complete_calls
    return completion


def read_everywhere(make_parser: Callable[[], Parser | MessageParser], text: str) -> Completion:
    """Reads a text at once, cut at every position, and in pieces of 1, 2, 3 and 7 characters."""
    whole = read_pieces(make_parser(), text)
    for cut in range(len(text) + 1):
        assert read_pieces(make_parser(), text[:cut], text[cut:]) == whole, f"cut at {cut}"
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read_pieces(make_parser(), *pieces) == whole, f"pieces of {size}"
    return whole


@pytest.fixture(scope="session")
def read() -> Callable[..., Completion]:
    """Returns the function ``read(parser, *pieces)``."""
    return read_pieces


@pytest.fixture(scope="session")
def read_cut() -> Callable[..., Completion]:
    """Returns ``read_cut(make_parser, text)``, which checks that cuts do not matter."""
    return read_everywhere

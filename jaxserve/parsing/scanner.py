"""Reads the text of one answer once, from left to right, while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from jaxserve.parsing.event_writer import EventWriter

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Code that yields whenever it has to wait for more text, and returns a T."""

NAME = re.compile(r"[\w.\-/:]+")
"""The characters of a function's name."""

SPACE = re.compile(r"[ \t\r\n]+")


class Scanner:
    """The text that has arrived, the place up to which it is read, and the text held back.

    What has been read but not yet made an event is *held back*: `release` makes it content, `drop`
    forgets it. All reading methods are generators, to be called with ``yield from``.

    Attributes:
      out: where the events go.
      in_call: what is held back is the markup of a call that has been announced.
      passes_arguments: what is read is arguments, not to be held back.
      is_reasoning: text that is no markup is reasoning, not content.
    """

    def __init__(self, out: EventWriter) -> None:
        self.out = out
        self.in_call = False
        self.passes_arguments = False
        self.is_reasoning = False
        self._text = ""  # the last piece
        self._pos = 0  # in the last piece
        self._mark = 0  # where held-back text begins in the last piece
        self._held: list[str] = []  # held-back text of the pieces before
        self._follows_call = False  # no text has been released since a call
        self._is_closed = False

    def feed(self, text: str) -> None:
        """The next piece of text. All text before it must have been read."""
        assert self._pos == len(self._text)
        assert not self._is_closed
        if self._mark < self._pos:
            self._held.append(self._text[self._mark :])
        self._text, self._pos, self._mark = text, 0, 0

    def close(self) -> None:
        """There is no more text."""
        self._is_closed = True

    # What is held back.

    def take(self) -> str:
        """The text held back, which is no longer held back."""
        text = "".join([*self._held, self._text[self._mark : self._pos]])
        self.drop()
        return text

    def drop(self) -> None:
        """Forgets the text held back."""
        self._held.clear()
        self._mark = self._pos

    def release(self) -> None:
        """Makes the text held back content, or reasoning."""
        self._write(self.take())

    def settle(self) -> None:
        """Releases what is held back at the end of an answer, unless it is of or after a call."""
        text = self.take()
        if not self.in_call and not (self._follows_call and text.isspace()):
            self._write(text)

    def here(self) -> tuple[int, int]:
        """This place, for `since`; good until something is taken or dropped."""
        return len(self._held), self._pos - self._mark

    def since(self, place: tuple[int, int]) -> str:
        """The text between a place and here."""
        piece, offset = place
        if piece == len(self._held):
            return self._text[self._mark + offset : self._pos]
        first, *others = self._held[piece:]
        return "".join([first[offset:], *others, self._text[self._mark : self._pos]])

    # Calls.

    def start_call(self, name: str) -> None:
        """Announces a call. What is held back is its markup, and forgotten."""
        self.drop()
        self.in_call = self._follows_call = True
        self.out.start_call(name)

    def pass_arguments(self) -> None:
        """Makes what has been read arguments of the call that was started last."""
        self.out.arguments(self.take())

    # Reading.

    def more(self) -> Steps[bool]:
        """Whether there is a further character; waits until that is known."""
        while self._pos == len(self._text):
            if self._is_closed:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, not read yet; "" at the end."""
        if self._pos == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._pos]

    def advance(self) -> None:
        """Reads the character that was peeked at."""
        assert self._pos < len(self._text)
        self._pos += 1

    def accept(self, char: str) -> Steps[bool]:
        """Reads this character, if it is the next."""
        if (yield from self.peek()) != char:
            return False
        self._pos += 1
        return True

    def skip(self, pattern: re.Pattern[str] = SPACE) -> Steps[None]:
        """Reads characters of a class, ``[...]+``, as long as they come."""
        while (yield from self.more()):
            found = pattern.match(self._text, self._pos)
            if found is None:
                return
            self._pos = found.end()

    def seek(self) -> Steps[str]:
        """Skips white space; the character after it, not read yet, or "" at the end."""
        while (yield from self.more()):
            char = self._text[self._pos]
            if char not in " \t\r\n":
                return char
            yield from self.skip()
        return ""

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """As `skip`, and returns what was read."""
        place = self.here()
        yield from self.skip(pattern)
        return self.since(place)

    def match(self, *tags: str) -> Steps[str]:
        """Reads the one of these tags that comes next and returns it.

        Returns "" if none does; what agreed with the beginning of one has been read then. No tag is
        the beginning of another.
        """
        num_agreed = 0
        while (yield from self.more()):
            char = self._text[self._pos]
            tags = tuple(tag for tag in tags if tag[num_agreed] == char)
            if not tags:
                return ""
            self._pos += 1
            num_agreed += 1
            if len(tags[0]) == num_agreed:
                return tags[0]
        return ""

    def find(self, *tags: str) -> Steps[str]:
        """Releases text up to the first of these tags and returns it, or "" at the end.

        The tag, and white space before it, are held back. All tags begin with the same character,
        which they have nowhere else.
        """
        if not (yield from self.more()):
            return ""
        self.in_call = False
        self.release()
        while (yield from self.more()):
            start, end = self._pos, self._next_tag(tags)
            text = self._text[start:end].rstrip()
            if text:
                self._pos = start + len(text)
                self.release()
            self._pos = end
            if end == len(self._text):
                continue
            tag = yield from self.match(*tags)
            if tag:
                return tag
            self.release()
        return ""

    def until(self, *tags: str) -> Steps[tuple[str, str]]:
        """Reads to the end of the first of these tags: the text before it, and the tag.

        All is held back; the tag is "" at the end of the answer. Tags are as those of `find`.
        """
        place = self.here()
        while (yield from self.more()):
            self._pos = self._next_tag(tags)
            tag = yield from self.match(*tags)
            if tag:
                return self.since(place)[: -len(tag)], tag
        return self.since(place), ""

    def rest(self) -> Steps[None]:
        """Releases all text up to the end."""
        self.in_call = False
        while (yield from self.more()):
            self._pos = len(self._text)
            self.release()

    def _next_tag(self, tags: tuple[str, ...]) -> int:
        """Where one of the tags begins in the last piece, or may begin; its length if none does."""
        first = tags[0][0]
        assert all(tag.rfind(first) == 0 for tag in tags)
        place = self._text.find(first, self._pos)
        while place >= 0:
            if any(tag.startswith(self._text[place : place + len(tag)]) for tag in tags):
                return place
            place = self._text.find(first, place + 1)
        return len(self._text)

    def _write(self, text: str) -> None:
        self._follows_call = self._follows_call and not text
        if self.is_reasoning:
            self.out.reasoning(text)
        else:
            self.out.content(text)


def read_whole(text: str, reader: Callable[[Scanner], Steps[T]]) -> T | None:
    """What a reader returns for a text that is complete; None if it does not read all of it.

    White space after what it reads is ignored.
    """

    def read(scan: Scanner) -> Steps[T | None]:
        value = yield from reader(scan)
        yield from scan.skip()
        return value if (yield from scan.peek()) == "" else None

    scan = Scanner(EventWriter(None))
    scan.feed(text)
    scan.close()
    steps = read(scan)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("a complete text is nothing to wait for")

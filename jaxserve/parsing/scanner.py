"""Reads the text of one completion once, from left to right, while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from jaxserve.parsing.events import EventWriter

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Code that yields whenever it has to wait for more text, and returns a T."""

NAME = re.compile(r"[\w.\-/:]+")
"""The characters of a function's name."""

SPACE = re.compile(r"[ \t\r\n]+")


class Scanner:
    """The text that has arrived, the position up to which it has been read, and the held text.

    Text that has been read but is not yet part of an event is *held*: `release` makes it content,
    `drop` discards it. All reading methods are generators; call them with ``yield from``.

    Attributes:
      out: the writer of the events.
      in_call: the held text is markup of a call that has begun.
      passes_arguments: text that is read is arguments, which need not be held.
      is_reasoning: released text is reasoning, not content.
    """

    def __init__(self, out: EventWriter) -> None:
        self.out = out
        self.in_call = False
        self.passes_arguments = False
        self.is_reasoning = False
        self._text = ""  # the last piece
        self._pos = 0  # position in the last piece
        self._held_from = 0  # start of the held text in the last piece
        self._held: list[str] = []  # held text of the pieces before
        self._follows_call = False  # no text has been released since a call
        self._is_closed = False

    def feed(self, text: str) -> None:
        """Adds a piece of text. All text before it must have been read."""
        assert self._pos == len(self._text)
        assert not self._is_closed
        if self._held_from < self._pos:
            self._held.append(self._text[self._held_from :])
        self._text, self._pos, self._held_from = text, 0, 0

    def close(self) -> None:
        """Ends the text."""
        self._is_closed = True

    # The held text.

    def take(self) -> str:
        """Returns the held text and clears it."""
        text = "".join([*self._held, self._text[self._held_from : self._pos]])
        self.drop()
        return text

    def drop(self) -> None:
        """Discards the held text."""
        self._held.clear()
        self._held_from = self._pos

    def release(self) -> None:
        """Makes the held text content, or reasoning."""
        self._write(self.take())

    def settle(self) -> None:
        """Releases the held text, except markup of a call and white space after a call."""
        text = self.take()
        if not self.in_call and not (self._follows_call and text.isspace()):
            self._write(text)

    def position(self) -> tuple[int, int]:
        """Returns the position, for `since`; valid until held text is taken or dropped."""
        return len(self._held), self._pos - self._held_from

    def since(self, start: tuple[int, int]) -> str:
        """Returns the text between an earlier position and this one."""
        piece, offset = start
        if piece == len(self._held):
            return self._text[self._held_from + offset : self._pos]
        first, *others = self._held[piece:]
        return "".join([first[offset:], *others, self._text[self._held_from : self._pos]])

    # Calls.

    def start_call(self, name: str) -> None:
        """Begins a call. Drops the held text, which is markup of the call."""
        self.drop()
        self.in_call = self._follows_call = True
        self.out.start_call(name)

    def pass_arguments(self) -> None:
        """Makes the held text arguments of the call that began last."""
        self.out.arguments(self.take())

    # Reading.

    def more(self) -> Reading[bool]:
        """Returns True if there is another character; waits until that is known."""
        while self._pos == len(self._text):
            if self._is_closed:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end."""
        if self._pos == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._pos]

    def advance(self) -> None:
        """Reads the character that `peek` returned."""
        assert self._pos < len(self._text)
        self._pos += 1

    def accept(self, char: str) -> Reading[bool]:
        """Reads this character if it comes next; returns True if it does."""
        if (yield from self.peek()) != char:
            return False
        self._pos += 1
        return True

    def skip(self, pattern: re.Pattern[str] = SPACE) -> Reading[None]:
        """Reads characters as long as they match ``pattern``, a class ``[...]+``."""
        while (yield from self.more()):
            found = pattern.match(self._text, self._pos)
            if found is None:
                return
            self._pos = found.end()

    def seek(self) -> Reading[str]:
        """Skips white space; returns the next character without reading it, or "" at the end."""
        while (yield from self.more()):
            char = self._text[self._pos]
            if char not in " \t\r\n":
                return char
            yield from self.skip()
        return ""

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads characters as `skip` does, and returns them."""
        start = self.position()
        yield from self.skip(pattern)
        return self.since(start)

    def match(self, *tags: str) -> Reading[str]:
        """Reads the tag that comes next and returns it.

        Returns "" if no tag comes next; then the characters that agreed with the beginning of a tag
        have been read. No tag may be the beginning of another.
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

    def find(self, *tags: str) -> Reading[str]:
        """Releases text up to the first of these tags; returns the tag, or "" at the end.

        The tag and white space before it are held. All tags must begin with the same character,
        and must not contain it elsewhere.
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

    def until(self, *tags: str) -> Reading[tuple[str, str]]:
        """Reads to the end of the first of these tags; returns the text before it, and the tag.

        All of it is held. The tag is "" at the end of the text. See `find` for valid tags.
        """
        start = self.position()
        while (yield from self.more()):
            self._pos = self._next_tag(tags)
            tag = yield from self.match(*tags)
            if tag:
                return self.since(start)[: -len(tag)], tag
        return self.since(start), ""

    def rest(self) -> Reading[None]:
        """Releases all text up to the end."""
        self.in_call = False
        while (yield from self.more()):
            self._pos = len(self._text)
            self.release()

    def _next_tag(self, tags: tuple[str, ...]) -> int:
        """Returns where a tag, or a part of a tag at the end, begins in the last piece.

        Returns the length of the piece if there is no tag.
        """
        first = tags[0][0]
        assert all(tag.rfind(first) == 0 for tag in tags)
        start = self._text.find(first, self._pos)
        while start >= 0:
            if any(tag.startswith(self._text[start : start + len(tag)]) for tag in tags):
                return start
            start = self._text.find(first, start + 1)
        return len(self._text)

    def _write(self, text: str) -> None:
        self._follows_call = self._follows_call and not text
        if self.is_reasoning:
            self.out.reasoning(text)
        else:
            self.out.content(text)


def read_whole(text: str, reader: Callable[[Scanner], Reading[T]]) -> T | None:
    """Returns the result of a reader for a whole text; None if the reader does not read all of it.

    White space at the end of the text is ignored.
    """

    def read(scan: Scanner) -> Reading[T | None]:
        value = yield from reader(scan)
        yield from scan.skip()
        return value if (yield from scan.peek()) == "" else None

    scan = Scanner(EventWriter(None))
    scan.feed(text)
    scan.close()
    try:
        next(read(scan))
    except StopIteration as end:
        return end.value
    raise AssertionError("the reader waits for more text after the end")

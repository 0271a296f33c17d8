"""Finds rules of a grammar that no finite text matches.

In ``start: "a" list`` with ``list: "b" list``, a completion that begins the list never ends.
llguidance follows such a rule for ever. This module reads the part of the Lark syntax that says
which rule needs which other rules; terms that it does not know count as finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_PASSES = 64
"""Maximum number of passes over the rules. The order of the rules of a long grammar can need more;
its rules then count as finite."""

START = "start"

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^>\n]*>|@\w+|->[ \t]*\w+)
    |(?P<percent>%\w+)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<count>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?|\{[ \t]*\d*[ \t]*,?[ \t]*\d*[ \t]*\})
    |(?P<sign>\.\.|.)""",
    re.VERBOSE,
)
_INLINE = ("%json", "%regex", "%lark")
"""Terms that a block in braces follows. Other words with % begin a line of their own."""


class _Unknown(Exception):
    """The text has a form that this module does not know."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    starts_line: bool


@dataclass(slots=True)
class _Sequence:
    """Terms in a row: the rules and the groups of alternatives that it needs, and all others."""

    rules: list[str] = field(default_factory=list)
    groups: list[list[_Sequence]] = field(default_factory=list)
    optional: list[_Sequence] = field(default_factory=list)

    def is_finite(self, finite: set[str]) -> bool:
        """Returns whether a finite text matches if the rules in ``finite`` have one."""
        return all(name in finite for name in self.rules) and all(
            any(choice.is_finite(finite) for choice in group) for group in self.groups
        )

    def names(self) -> Iterator[str]:
        """Yields the names of all rules in it."""
        yield from self.rules
        for group in [*self.groups, self.optional]:
            for choice in group:
                yield from choice.names()


def endless_rule(grammar: str) -> str | None:
    """Returns the name of a rule that a text can reach and that no finite text matches.

    Args:
      grammar: a grammar in Lark syntax.

    Returns:
      The name, or None if there is no such rule, or if the grammar is not understood.
    """
    try:
        return _endless_rule(_rules(list(_tokens(grammar))))
    except (_Unknown, RecursionError):
        return None


def _endless_rule(rules: dict[str, list[_Sequence]]) -> str | None:
    finite: set[str] = set()
    open_rules = list(rules)
    for _ in range(MAX_PASSES):
        left = []
        for name in reversed(open_rules):
            if any(choice.is_finite(finite) for choice in rules[name]):
                finite.add(name)
            else:
                left.append(name)
        if len(left) == len(open_rules):
            return next((name for name in _reached(rules) if name not in finite), None)
        open_rules = left
    return None


def _reached(rules: dict[str, list[_Sequence]]) -> list[str]:
    """Returns the names of the rules that ``start`` uses, directly or not, itself first."""
    reached = dict.fromkeys([START] if START in rules else [])
    waiting = list(reached)
    while waiting:
        for choice in rules[waiting.pop()]:
            new = [name for name in choice.names() if name not in reached]
            reached |= dict.fromkeys(new)
            waiting += new
    return list(reached)


def _tokens(grammar: str) -> Iterator[_Token]:
    starts_line, position = True, 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        assert match is not None  # any character is a sign
        position, kind = match.end(), match.lastgroup
        if kind == "newline":
            starts_line = True
        elif kind == "percent" and match[0] in _INLINE:
            position = _end_of_block(grammar, position)
            yield _Token("text", match[0], starts_line)
            starts_line = False
        elif kind == "percent":
            position = (grammar.find("\n", position) + 1 or len(grammar) + 1) - 1
        elif kind != "space":
            assert kind is not None
            yield _Token(kind, match[0], starts_line)
            starts_line = False


def _end_of_block(grammar: str, position: int) -> int:
    """Returns the end of the JSON object that starts at ``position``, after any space."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[{}]').finditer(grammar, position):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise _Unknown


def _rules(tokens: list[_Token]) -> dict[str, list[_Sequence]]:
    """Returns the alternatives of each rule. Raises `_Unknown`."""
    heads = [i for i, token in enumerate(tokens) if token.starts_line and token.kind == "name"]
    rules: dict[str, list[_Sequence]] = {}
    for i, end in zip(heads, [*heads[1:], len(tokens)], strict=False):
        start = i + 1
        while start < end and tokens[start].text != ":":  # attributes and a priority
            start += 1
        if start == end or tokens[i].text in rules:
            raise _Unknown
        reader = _Reader(tokens[start + 1 : end])
        rules[tokens[i].text] = reader.choices("")
    for choice in [choice for choices in rules.values() for choice in choices]:
        if any(name not in rules for name in choice.names()):
            raise _Unknown
    return rules


class _Reader:
    """Reads the right-hand side of one rule."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0

    def choices(self, closing: str) -> list[_Sequence]:
        """Reads alternatives up to a closing bracket, or to the end if there is none."""
        choices = [_Sequence()]
        while self._next < len(self._tokens):
            token = self._take()
            if token.text == closing:
                return choices
            if token.text == "|":
                choices.append(_Sequence())
            elif token.kind == "name":
                if token.text.isupper():
                    continue  # a terminal, which cannot refer to itself
                if self._may_be_left_out():
                    choices[-1].optional.append(_Sequence([token.text]))
                else:
                    choices[-1].rules.append(token.text)
            elif token.text in ("(", "["):
                group = self.choices(")" if token.text == "(" else "]")
                if token.text == "[" or self._may_be_left_out():
                    choices[-1].optional += group
                else:
                    choices[-1].groups.append(group)
            elif token.kind == "sign" and token.text not in ("&", "~", "..", "?", "*", "+"):
                raise _Unknown
        if closing:
            raise _Unknown
        return choices

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _may_be_left_out(self) -> bool:
        """Returns whether the operator that follows a term allows no occurrence of it."""
        if self._next == len(self._tokens):
            return False
        token = self._tokens[self._next]
        if token.kind == "count":
            least = re.match(r"[~{]\s*(\d*)", token.text)
            assert least is not None
            return int(least[1] or 0) == 0
        return token.text in ("?", "*")

"""Rules without finite texts, compared with a search over derivations."""

import random

import pytest

from jaxserve.structured_output.lark_rules import MAX_PASSES, endless_rule

NAMES = ("start", "a", "b", "c", "d")
TERM = ('"x"', "WORD", "/y+/")


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "a"', None),
        ('start: "a" start', "start"),
        ('start: "a" start | "b"', None),
        ('start: "a" x\nx: "b" x\n  | "c"', None),
        ('start: "a" | x\nx: "b" x | "c" x', "x"),
        ('start: x?\nx: "b" x', "x"),
        ('start: x{0,3}\nx: "b" x', "x"),
        ('start: "q" x{,3} "r"\nx: "b" x*', None),
        ('start: "q" x ~ 2..3\nx: "b" x ~ 1', "start"),
        ('start: [x]\nx: "b" (x | x "c")', "x"),
        ('start: (x "b")+ | "q"\nx: "(" x ")" | "d"', None),
        ('start: a b\na: b "x"\nb: a', "start"),
        ('start: "a"\nunused: unused', None),
        ('start: %json {"enum": ["}", "\\""]} x\nx: x', "start"),
        ('start: A "x".."z" B\nA: /a/ | "b"i\nB: C & ~/d/ // x: x\nC: "c" # x: x', None),
        ('start: y -> name\ny[suffix="]:", max_tokens=5]: /a:\\/(/ z\nz: "a" [z]', None),
        ('start.5: "a" start', "start"),
        ("%ignore / x: x/\nstart: <|end|> <[5]> @content", None),
        # Forms that are not understood count as finite.
        ('start: "a" start ?? {', None),
        ("start: x::y: start", None),
        ('start: "a" missing start', None),
        ("root: root", None),
        ("", None),
        ("start: " + "(" * 100_000, None),
    ],
)
def test_finds_rules_that_never_end(grammar, expected):
    assert endless_rule(grammar) == expected


def random_rules(source: random.Random) -> dict[str, list[list[str]]]:
    """Returns for each rule its alternatives, each a list of terms."""
    return {
        name: [
            [source.choice((*TERM, *NAMES[1:], *NAMES[1:])) for _ in range(source.randint(1, 3))]
            for _ in range(source.randint(1, 2))
        ]
        for name in NAMES
    }


def ends(name: str, rules: dict[str, list[list[str]]], depth: int) -> bool:
    """Whether a derivation of at most this depth ends."""
    return depth > 0 and any(
        all(term not in rules or ends(term, rules, depth - 1) for term in choice)
        for choice in rules[name]
    )


@pytest.mark.parametrize("seed", range(200))
def test_agrees_with_a_search_over_derivations(seed):
    source = random.Random(seed)
    rules = random_rules(source)
    lines = [f"{n}: " + " | ".join(" ".join(c) for c in rules[n]) for n in NAMES]
    grammar = "\n".join([*lines, "WORD: /[a-z]/"])
    reached, waiting = {"start"}, ["start"]
    while waiting:
        new = {t for choice in rules[waiting.pop()] for t in choice if t in rules} - reached
        reached |= new
        waiting += new
    endless = {name for name in reached if not ends(name, rules, len(NAMES) + 1)}
    found = endless_rule(grammar)
    assert (found in endless) if endless else found is None


def test_the_search_is_bounded():
    """Rules in the order that needs the most passes count as finite."""
    count = 3 * MAX_PASSES
    forward = [f'r{i}: "x" r{i + 1}' for i in range(count)]
    assert endless_rule("\n".join(["start: r0", *forward, f'r{count}: "y"'])) is None
    backward = [f'r{i + 1}: "x" r{i}' for i in reversed(range(count))]
    assert endless_rule("\n".join([f"start: r{count}", *backward, 'r0: "y"'])) is None
    assert endless_rule("\n".join([f"start: r{count}", *reversed(backward), 'r0: "y"'])) is None

"""Docstrings, comments, strings and documents use plain English.

Each rule bans a phrase that earlier versions of the code used, and names a plain alternative.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "server", "pallas_kernels", "scripts")
MAX_SUMMARY_CHARS = 100

# Regular expressions that must not match anywhere, each with its plain alternative. A space matches
# any white space. Case does not count.
PHRASES = {
    r"(what|that|which) (is|are) no (?!longer\b|more\b)": "name the thing, or say 'is not a ...'",
    r"what there is": "name the thing",
    r"would be one": "name the thing",
    r"on board": "in flight",
    r"aboard": "in flight",
    r"under way": "in flight, or running",
    r"obituar(y|ies)": "exit message",
    r"stop texts?": "stop string",
    r"at the door": "when the request arrives",
    r"deaf": "say what cannot be received",
    r"dumb": "say what cannot be sent",
    r"(say|says|said|saying) no": "refuse, or reject",
    r"a text or an?": "a string or a",
    r"(must|should|may) be (a text|texts)": "must be a string",
    r"(list|array|tuple) of texts": "list of strings",
}

# Docstrings must not begin like this.
BEGINNINGS = {
    "What ": "Returns ..., or the name of the thing",
    "Whether it is what": "Returns whether it is a ...",
    "Of a ": "Returns the ... of a ...",
    "Of the ": "Returns the ... of the ...",
    "That of": "The ... of ...",
    "Those ": "The ... that ...",
    "Such a": "A ...",
    "One with": "A ... with ...",
    "How ": "The number of ..., or the way in which ...",
    "None:": "Say what the value is, then what None means",
}

BANNED = [(re.compile(rf"\b{p}\b".replace(" ", r"\s+"), re.I), why) for p, why in PHRASES.items()]


@dataclass(frozen=True)
class Hit:
    """A breach of a rule, at a line of a file."""

    line: int
    found: str
    alternative: str


@dataclass(frozen=True)
class Docstring:
    """A docstring of a module, class, function or attribute.

    ``may_ask`` is true where it may begin with "Whether".
    """

    line: int
    text: str
    may_ask: bool


def phrases(text: str, line: int = 1) -> Iterator[Hit]:
    """Yields the banned phrases in a text that begins at a line."""
    for pattern, alternative in BANNED:
        for match in pattern.finditer(text):
            found = " ".join(match[0].split())
            yield Hit(line + text.count("\n", 0, match.start()), found, alternative)


def source_hits(source: str) -> list[Hit]:
    """Returns all hits in a Python file, by line."""
    tree = ast.parse(source)
    hits: list[Hit] = []
    for line, text in [*strings(tree), *comments(source)]:
        hits += phrases(text, line)
    if not (ast.get_docstring(tree) or "").strip():
        hits.append(Hit(1, "no module docstring", "say what the module does"))
    for docstring in docstrings(tree):
        hits += docstring_hits(docstring)
    return sorted(hits, key=lambda hit: hit.line)


def docstring_hits(docstring: Docstring) -> Iterator[Hit]:
    """Yields the hits in the first line of a docstring."""
    summary = docstring.text.strip().partition("\n")[0]
    alternatives = [plain for begin, plain in BEGINNINGS.items() if summary.startswith(begin)]
    if summary.startswith("Whether") and not docstring.may_ask:
        alternatives.append("Returns whether ...")
    if alternatives:
        yield Hit(docstring.line, summary, alternatives[0])
    if len(summary) > MAX_SUMMARY_CHARS:
        yield Hit(docstring.line, summary, f"at most {MAX_SUMMARY_CHARS} characters")


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each string; ``{}`` stands for the fields of an f-string."""
    inner: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            inner.update(node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of each run of comments on adjacent lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(t.start[0], t.string.lstrip("# ")) for t in tokens if t.type == tokenize.COMMENT]
    for _, run in groupby(enumerate(found), key=lambda pair: pair[1][0] - pair[0]):
        lines = [comment for _, comment in run]
        yield lines[0][0], "\n".join(text for _, text in lines)


def docstrings(tree: ast.AST) -> Iterator[Docstring]:
    """Yields each string that stands alone as a statement."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for at, statement in enumerate(body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield Docstring(statement.lineno, text, at > 0 or answers_yes_or_no(node))


def answers_yes_or_no(node: ast.AST) -> bool:
    """Returns whether a node is a property or a function that returns a bool."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    returns = ast.unparse(node.returns) if node.returns else ""
    return bool(names & {"property", "cached_property"}) or returns == "bool"


def folders() -> dict[str, list[Path]]:
    """Returns the files to check, by folder."""
    found: dict[str, list[Path]] = {"documents": [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    for path in [*paths, ROOT / ".ci" / "run"]:
        is_script = path.is_file() and path.suffix in ("", ".sh")
        if path.suffix == ".py" or is_script:
            found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    return found


def test_every_package_is_read() -> None:
    assert {*PACKAGES, "documents", ".ci", "jaxserve/checkpoint", "scripts/gpu"} <= set(folders())


@pytest.mark.parametrize("folder", sorted(folders()))
def test_prose(folder: str) -> None:
    lines = []
    for path in sorted(folders()[folder]):
        text = path.read_text()
        for hit in source_hits(text) if path.suffix == ".py" else phrases(text):
            place = f"{path.relative_to(ROOT)}:{hit.line}"
            lines.append(f"{place}: {hit.found!r}; better: {hit.alternative}")
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


BAD = '''\
"""A module."""
def f():
    """{docstring}"""
    # {comment}
    # {more}
    return f"{string} {{f}}"
'''


def bad(docstring: str = "", comment: str = "", more: str = "", string: str = "") -> list[Hit]:
    return source_hits(BAD.format(docstring=docstring, comment=comment, more=more, string=string))


def test_plain_english_passes() -> None:
    assert not bad("Returns one.", "A request that is no longer in flight.", "", "a stop string")
    assert not phrases_of("Deafening, dumbbells, on boarding.")


def phrases_of(text: str) -> list[Hit]:
    return list(phrases(text))


@pytest.mark.parametrize(
    "text",
    [
        "what is no request",
        "that is no number",
        "Which is no bool",
        "what there is to say",
        "on board",
        "goes aboard",
        "under way",
        "an obituary",
        "obituaries",
        "a stop text",
        "at the door",
        "deaf",
        "dumb",
        "it says no",
        "a text or a list",
        "must be a text",
        "a list of texts",
    ],
)
def test_a_banned_phrase_is_found_anywhere(text: str) -> None:
    assert [hit.line for hit in bad(docstring=text)] == [3]
    assert [hit.line for hit in bad(comment=text)] == [4]
    assert [hit.line for hit in bad(more=text)] == [5]
    assert [hit.line for hit in bad(string=text)] == [6]
    assert phrases_of(f"A document.\n{text}\n") == [Hit(2, *hit_of(text))]


def hit_of(text: str) -> tuple[str, str]:
    (hit,) = phrases_of(text)
    return hit.found, hit.alternative


def test_a_phrase_is_found_across_lines() -> None:
    assert [hit.line for hit in bad(comment="requests under", more="way")] == [4]
    assert [hit.line for hit in bad(docstring="Requests\n\n    on\n    board.")] == [5]
    assert source_hits('"""A module."""\nx = (\n    "must be a "\n    "text"\n)') == [
        Hit(3, "must be a text", "must be a string")
    ]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_bad_beginning_of_a_docstring_is_found(beginning: str) -> None:
    (hit,) = bad(docstring=f"{beginning} it does.")
    assert hit.line == 3
    assert hit.alternative == BEGINNINGS[beginning]
    attribute = f'"""A module."""\nx = 1\n"""{beginning} it is."""\n'
    assert [hit.line for hit in source_hits(attribute)] == [3]


def test_only_properties_and_booleans_ask_whether() -> None:
    template = '"""A module."""\n{}\ndef f(self){}:\n    """Whether it is on."""\n'
    assert source_hits(template.format("@property", "")) == []
    assert source_hits(template.format("", " -> bool")) == []
    assert [hit.line for hit in source_hits(template.format("", " -> int"))] == [4]


def test_long_summaries_and_missing_headers_are_found() -> None:
    assert [hit.line for hit in bad(docstring="x" * 101)] == [3]
    assert not bad(docstring="x" * 100)
    for header in ("", '""""""', '"""   """', "import ast"):
        assert [hit.line for hit in source_hits(header)] == [1]

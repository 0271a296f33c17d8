"""Flags and files that the documents name exist."""

import re
from pathlib import Path

import pytest

import server.__main__
from jaxserve.bench import __main__ as bench
from jaxserve.bench import drafts, front, neighbours
from jaxserve.offline import __main__ as offline

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Flags of scripts/lint and pytest, and files that docs/extending.md proposes.
OTHER_FLAGS = {"--fix", "--help"}
PROPOSED = {"example.py", "example_attention.py", "float8.py", "count.py"}


def file_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=file_name)
def test_flags_exist(document: Path) -> None:
    known = set(OTHER_FLAGS)
    programs = (server.__main__, offline, bench, drafts, front, neighbours)
    for parser in (program.make_parser() for program in programs):
        known |= parser._option_string_actions.keys()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", document.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=file_name)
def test_files_exist(document: Path) -> None:
    named = set(re.findall(r"[\w./]*\w\.(?:py|md)\b", document.read_text()))
    folders = (ROOT, ROOT / "jaxserve", ROOT / "docs")
    packages = (ROOT / "jaxserve", ROOT / "server", ROOT / "pallas_kernels")
    anywhere = {path.name for package in packages for path in package.rglob("*.py")}
    missing = {
        name
        for name in named
        if not any((folder / name).exists() for folder in folders)
        and name not in anywhere
        and Path(name).name not in PROPOSED
    }
    assert missing == set()


def test_the_path_of_a_plain_request_names_at_most_30_files_once_each() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, path = text.partition("## The path of a request")
    plain, _, _ = path.partition("What other requests add")
    named = re.findall(r"`([\w/]+\.py)`", plain)
    assert 20 <= len(named) <= 30
    assert len(named) == len({name.removeprefix("jaxserve/") for name in named})

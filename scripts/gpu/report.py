"""The findings of the parts of the check: lines in a file, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A part cannot run on this machine; the message is the reason."""


@dataclass(frozen=True)
class Finding:
    """One line of the table: its subject, its figures, and the problem or an empty string."""

    what: str
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def row(self) -> str:
        """The finding as a line of the table."""
        figures = "  ".join(f"{name} {_short(value)}" for name, value in self.values.items())
        return f"{self.what:44s} {figures}" + (f"  FAILED: {self.problem}" * bool(self.problem))


class Report:
    """Findings that are written to a file as soon as they are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def add(self, what: str, *, problem: str = "", **values: Any) -> None:
        """Adds a finding to the file and prints it."""
        finding = Finding(what, values, problem)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")
        print(finding.row, flush=True)

    def findings(self) -> list[Finding]:
        """Returns all findings so far."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [Finding(**json.loads(line)) for line in lines]


def facts(findings: Iterable[Finding]) -> dict[str, float]:
    """Returns the figures of ``findings`` by name; the last figure of a name wins."""
    merged: dict[str, float] = {}
    for finding in findings:
        merged |= finding.values
    return merged


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

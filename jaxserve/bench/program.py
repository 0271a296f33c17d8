"""What the benchmark programs have in common: flags, a table on the terminal, figures in a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxserve.config import ModelConfig
from jaxserve.errors import JaxserveError


class Report(Protocol):
    """A dataclass with everything that was measured."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def table(self) -> str:
        """For people, in Markdown."""
        ...


def base_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that every program has."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=ModelConfig().model, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def run(
    measure: Callable[[argparse.Namespace], Report],
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
) -> int:
    """Measures and reports; returns the exit code."""
    args = parser.parse_args(argv)
    try:
        report = measure(args)
    except (JaxserveError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.table())
    if args.output is not None:
        args.output.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return 0

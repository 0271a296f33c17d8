"""Code that the benchmark programs share: flags, requests with random prompts, and reports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxserve.bench.output_file import check_output, replacing
from jaxserve.checkpoint.locate import open_tokenizer
from jaxserve.config import ModelConfig
from jaxserve.errors import JaxserveError

Body = dict[str, Any]


class Report(Protocol):
    """A dataclass that holds all figures of a program."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        ...


def base_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Builds a parser with the flags that every program has."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default=ModelConfig().model, help="model to serve (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write the figures to, as JSON"
    )
    return parser


def add_load_flags(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """Adds the flags of the load, with these default lengths, and the flags for the server."""
    parser.add_argument(
        "--input-len", type=int, default=input_len, help="tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--output-len",
        type=int,
        default=output_len,
        help="tokens of a completion (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random prompts (default: 0)"
    )
    parser.add_argument(
        "server_flags", nargs="*", metavar="SERVER_FLAG", help="flags of the server, after --"
    )


def body_maker(args: argparse.Namespace) -> Callable[[], Body]:
    """Returns a function that makes bodies of greedy requests, each with a new random prompt.

    Their completions ignore end tokens, so all have the length of ``--output-len``.
    """
    vocab_size = open_tokenizer(args.model).vocab_size
    numbers = random.Random(args.seed)

    def body() -> Body:
        prompt = [numbers.randrange(vocab_size) for _ in range(args.input_len)]
        length = args.output_len
        return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}

    return body


def run(
    measure: Callable[[argparse.Namespace], Report],
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
) -> int:
    """Measures, prints the table, writes the figures, and returns the exit code."""
    args = parser.parse_args(argv)
    try:
        if args.output is not None:
            check_output(args.output)
        report = measure(args)
        print(report.table())
        if args.output is not None:
            with replacing(args.output) as path:
                path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    except (JaxserveError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0

"""Measures what flags of the server gain or cost.

    scripts/bench compare [--model M] [--concurrent N...] [--output FILE] -- SERVER_FLAG...

Two servers run at the same time, one with the flags after -- and one without them, or with those
of --base-flags. The same requests, with random prompts, go to one and then to the other, in
alternation.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench.figures import Machine
from jaxserve.bench.pairs import Pairs, add_pair_flags, run_pairs, two_servers
from jaxserve.bench.program import add_load_flags, base_parser, body_maker, run


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The figures for one number of concurrent requests."""

    num_requests: int
    pairs: Pairs

    def line(self) -> str:
        """Formats a line of the table."""
        return f"| {self.num_requests} | {self.pairs.cells()} |"


@dataclass(frozen=True, slots=True)
class ComparedFigures:
    """All figures of a run."""

    machine: Machine
    model: str
    base_flags: list[str]
    server_flags: list[str]
    input_len: int
    output_len: int
    rows: list[ComparedRow]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}: {self.input_len} tokens in, {self.output_len} out, medians",
                f"base: {' '.join(self.base_flags) or 'no flags'}; "
                f"compared: {' '.join(self.server_flags) or 'no flags'}",
                "",
                "| requests | tokens/s, base | compared | ratio | processor time |",
                "|---|---|---|---|---|",
                *(row.line() for row in self.rows),
            ]
        )


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(lambda args: asyncio.run(measure(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench compare", __doc__)
    add_pair_flags(parser, concurrent=[1, 16, 64])
    parser.add_argument(
        "--base-flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="flags of the other server: --base-flags='--dtype float32' (default: none)",
    )
    add_load_flags(parser, input_len=128, output_len=128)
    return parser


async def measure(args: argparse.Namespace) -> ComparedFigures:
    """Starts both servers, and sends them the same requests in turn."""
    body = body_maker(args)
    base_flags = ["--model", args.model, *args.base_flags]
    flags = ["--model", args.model, *args.server_flags]
    rows: list[ComparedRow] = []
    async with two_servers(base_flags, flags) as (base, second):
        await run_pairs(base, second, [body()], 1)  # the first request of a server is slower
        for num_requests in args.concurrent:
            bodies = [body() for _ in range(num_requests)]
            pairs = await run_pairs(base, second, bodies, args.repeats)
            rows.append(ComparedRow(num_requests, pairs))
            print(rows[-1].line(), file=sys.stderr, flush=True)
    return ComparedFigures(
        machine=Machine.this(),
        model=args.model,
        base_flags=args.base_flags,
        server_flags=args.server_flags,
        input_len=args.input_len,
        output_len=args.output_len,
        rows=rows,
    )

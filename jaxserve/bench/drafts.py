"""Measures the gain of speculative decoding, on texts that repeat themselves and on others.

    scripts/bench drafts [--model M] [--repeats N] [--output FILE] [-- SERVER_FLAG...]

Two servers run at the same time, one of them with drafts. The same requests go to one and then
to the other, in alternation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench.figures import Machine
from jaxserve.bench.pairs import Pairs, add_pair_flags, run_pairs, two_servers
from jaxserve.bench.program import base_parser, run
from jaxserve.bench.server_process import HOST, ServerProcess
from jaxserve.config import SpeculationConfig

WORDS = (
    *("river", "stone", "cloud", "garden", "winter", "letter", "mirror", "engine", "harbor"),
    *("copper", "silver", "window", "forest", "bridge", "candle", "market", "island", "planet"),
)
TEXTS = {"repetitive": 0.0, "ordinary": 0.0, "ordinary, drawn": 0.8}
"""Kinds of texts, each with its temperature. Greedy texts of small models repeat themselves too."""


def prompt(text: str, seed: int) -> str:
    """Returns a prompt for a kind of text in `TEXTS`, with words that depend on the seed."""
    words = random.Random(seed).sample(WORDS, 6)
    if text != "repetitive":
        return f"The old captain told us about the {words[0]} and the {words[1]}. It was"
    methods = (f"    def {word}(self):\n        return self._{word}\n\n" for word in words)
    return "class Settings:\n" + "".join(methods)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The figures for one kind of text and one number of concurrent requests.

    Attributes:
      text: a name in `TEXTS`.
      num_requests: concurrent requests.
      tokens_per_step: tokens that a request gets in a step, with drafts; 1 without.
      pairs: the runs without drafts and with them.
    """

    text: str
    num_requests: int
    tokens_per_step: float
    pairs: Pairs

    def line(self) -> str:
        """Formats a line of the table."""
        cells = f"{self.text} | {self.num_requests} | {self.tokens_per_step:.2f}"
        return f"| {cells} | {self.pairs.cells()} |"


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """All figures of a run."""

    machine: Machine
    model: str
    server_flags: list[str]
    draft_flags: list[str]
    output_len: int
    rows: list[DraftRow]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        flags = f" with {' '.join(self.server_flags)}" if self.server_flags else ""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}{flags}, {' '.join(self.draft_flags)}: {self.output_len} tokens out",
                "",
                "| text | requests | tokens a step | tokens/s without drafts | with drafts | ratio "
                "| processor time |",
                "|---|---|---|---|---|---|---|",
                *(row.line() for row in self.rows),
            ]
        )


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(lambda args: asyncio.run(measure(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench drafts", __doc__)
    add_pair_flags(parser, concurrent=[1, 4, 16])
    parser.add_argument(
        "--output-len", type=int, default=128, help="tokens of a completion (default: 128)"
    )
    parser.add_argument(
        "--speculative", default="ngram", help="flag of the server with drafts (default: ngram)"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=SpeculationConfig().num_speculative_tokens,
        help="flag of the server with drafts (default: %(default)s)",
    )
    parser.add_argument(
        "server_flags", nargs="*", metavar="SERVER_FLAG", help="flags of both servers, after --"
    )
    return parser


async def measure(args: argparse.Namespace) -> DraftFigures:
    """Starts both servers, and sends them the same requests in turn."""
    drafts = ["--speculative", args.speculative]
    drafts += ["--num-speculative-tokens", str(args.num_speculative_tokens)]
    flags = ["--model", args.model, *args.server_flags]
    rows: list[DraftRow] = []
    async with two_servers(flags, [*flags, *drafts]) as (plain, drafting):
        for text in TEXTS:
            for num_requests in args.concurrent:
                rows.append(await _row(plain, drafting, text, num_requests, args))
                print(rows[-1].line(), file=sys.stderr, flush=True)
    return DraftFigures(
        machine=Machine.this(),
        model=args.model,
        server_flags=args.server_flags,
        draft_flags=drafts,
        output_len=args.output_len,
        rows=rows,
    )


async def _row(
    plain: ServerProcess,
    drafting: ServerProcess,
    text: str,
    num_requests: int,
    args: argparse.Namespace,
) -> DraftRow:
    bodies = [
        {
            "prompt": prompt(text, seed),
            "temperature": TEXTS[text],
            "seed": seed,
            "max_tokens": args.output_len,
            "ignore_eos": True,
        }
        for seed in range(num_requests)
    ]
    before = accepted_tokens(await _metrics(drafting))
    pairs = await run_pairs(plain, drafting, bodies, args.repeats)
    accepted = accepted_tokens(await _metrics(drafting)) - before
    num_tokens = args.repeats * num_requests * args.output_len
    return DraftRow(
        text=text,
        num_requests=num_requests,
        tokens_per_step=num_tokens / (num_tokens - accepted),
        pairs=pairs,
    )


async def _metrics(server: ServerProcess) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{HOST}:{server.port}/metrics") as page:
            return page.read().decode()

    return await asyncio.to_thread(read)


def accepted_tokens(page: str) -> float:
    """Returns the accepted drafts that a page of metrics counts; 0 before the first step."""
    counter = r"^\w+:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$"
    return sum(map(float, re.findall(counter, page, re.MULTILINE)))

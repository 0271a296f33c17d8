"""Measures the gain of speculative decoding, on texts that repeat themselves and on others.

    scripts/bench drafts [--model M] [--repeats N] [--output FILE] [-- SERVER_FLAG...]

Two servers run at the same time, one of them with drafts. The same requests go to one and then
to the other, in alternation, so that both see the same changes in the speed of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.figures import Machine
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.program import Body, base_parser, run
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
      plain_rates, draft_rates: output tokens per second of each run, all requests together.
      cpu_ratios: processor time with drafts, divided by that without, of each pair of runs.
    """

    text: str
    num_requests: int
    tokens_per_step: float
    plain_rates: list[float]
    draft_rates: list[float]
    cpu_ratios: list[float]

    def line(self) -> str:
        """Formats a line of the table."""
        plain, drafts = statistics.median(self.plain_rates), statistics.median(self.draft_rates)
        return (
            f"| {self.text} | {self.num_requests} | {self.tokens_per_step:.2f} | {plain:.1f} "
            f"| {drafts:.1f} | {drafts / plain:.2f} | {statistics.median(self.cpu_ratios):.2f} |"
        )


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
    parser.add_argument(
        "--concurrent",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        help="numbers of concurrent requests (default: 1 4 16)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
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
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = ServerProcess(flags, log=Path(folder, "plain.log"))
        drafting = ServerProcess([*flags, *drafts], log=Path(folder, "drafts.log"))
        with plain, drafting:
            await asyncio.gather(plain.until_healthy(), drafting.until_healthy())
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
    runs = [(await _run(plain, bodies), await _run(drafting, bodies)) for _ in range(args.repeats)]
    accepted = accepted_tokens(await _metrics(drafting)) - before
    num_tokens = args.repeats * num_requests * args.output_len
    return DraftRow(
        text=text,
        num_requests=num_requests,
        tokens_per_step=num_tokens / (num_tokens - accepted),
        plain_rates=[rate for (rate, _), _ in runs],
        draft_rates=[rate for _, (rate, _) in runs],
        cpu_ratios=[cpu / plain_cpu for (_, plain_cpu), (_, cpu) in runs],
    )


async def _run(server: ServerProcess, bodies: list[Body]) -> tuple[float, float]:
    """Returns the output tokens per second and the processor time of a run."""
    cpu_seconds = server.cpu_seconds()
    timings = await asyncio.gather(*(stream_completion(HOST, server.port, b) for b in bodies))
    return output_rate(timings), server.cpu_seconds() - cpu_seconds


def output_rate(timings: Sequence[Timing]) -> float:
    """Returns the output tokens per second of a whole run, prefill included."""
    seconds = max(t.last_s for t in timings) - min(t.sent_s for t in timings)
    return sum(t.num_tokens for t in timings) / seconds


async def _metrics(server: ServerProcess) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{HOST}:{server.port}/metrics") as page:
            return page.read().decode()

    return await asyncio.to_thread(read)


def accepted_tokens(page: str) -> float:
    """Returns the accepted drafts that a page of metrics counts; 0 before the first step."""
    counter = r"^\w+:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$"
    return sum(map(float, re.findall(counter, page, re.MULTILINE)))

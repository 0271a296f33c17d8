"""Measures how much one request with special features slows down concurrent plain requests.

    scripts/bench neighbours [--model M] [--repeats N] [--output FILE] [-- SERVER_FLAG...]

Plain greedy requests (the neighbours) run together with one more request, which is plain or has a
feature such as a JSON schema. Runs alternate (plain, feature, plain, next feature, ...). Each run
with a feature is compared with the plain runs right before and after it, to cancel any drift of the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.figures import Machine
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.program import Body, add_load_flags, base_parser, body_maker, run
from jaxserve.bench.server_process import HOST, ServerProcess
from jaxserve.errors import JaxserveError


def features(output_len: int) -> dict[str, Body]:
    """Returns the features to measure: the extra fields of the one request, by name."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": output_len}
    schema = {"name": "numbers", "schema": numbers}
    return {
        "20 log probabilities": {"logprobs": 20},
        "a JSON schema": {"response_format": {"type": "json_schema", "json_schema": schema}},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "top-p and top-k": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
        "biases": {"logit_bias": {str(token): 1.0 for token in range(100)}},
    }


@dataclass(frozen=True, slots=True)
class NeighbourFigures:
    """The time between two tokens of the neighbours, relative to plain runs.

    Attributes:
      plain_ms: time between tokens next to a plain request: the median over all plain runs.
      ratios: for each feature and repeat, the time between tokens next to a request with it,
        divided by the time in plain runs.
      cpu_ratios: the same ratios for the processor time of all processes in the whole run, which
        other programs on the machine disturb less.
    """

    machine: Machine
    model: str
    server_flags: list[str]
    num_neighbours: int
    input_len: int
    output_len: int
    plain_ms: float
    ratios: dict[str, list[float]]
    cpu_ratios: dict[str, list[float]]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        flags = f" with {' '.join(self.server_flags)}" if self.server_flags else ""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}{flags}: {self.num_neighbours} plain greedy requests and one more, "
                f"{self.input_len} tokens in, {self.output_len} out; {self.plain_ms:.1f} ms "
                "between the tokens of the plain requests if the other is plain, too",
                "",
                "| the other asks for | times as long between tokens | processor time |",
                "|---|---|---|",
                *(
                    f"| {feature} | {_spread(ratios)} | {_spread(self.cpu_ratios[feature])} |"
                    for feature, ratios in self.ratios.items()
                ),
            ]
        )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(lambda args: asyncio.run(measure(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench neighbours", __doc__)
    parser.add_argument(
        "--num-neighbours", type=int, default=15, help="concurrent plain requests (default: 15)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs with each feature (default: 3)"
    )
    add_load_flags(parser, input_len=32, output_len=128)
    return parser


async def measure(args: argparse.Namespace) -> NeighbourFigures:
    """Starts the server, runs every feature once to warm up, then measures."""
    body = body_maker(args)
    wanted = features(args.output_len)
    plain: list[_Cost] = []
    ratios: dict[str, list[_Cost]] = {feature: [] for feature in wanted}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", args.model, *args.server_flags]
        with ServerProcess(flags, log=Path(folder, "server.log")) as server:
            await server.until_healthy()
            for fields in ({}, *wanted.values()):
                await _run(server, body, fields, args.num_neighbours)
            for _ in range(args.repeats):
                plain.append(await _run(server, body, {}, args.num_neighbours))
                for feature, fields in wanted.items():
                    cost = await _run(server, body, fields, args.num_neighbours)
                    plain.append(await _run(server, body, {}, args.num_neighbours))
                    ratios[feature].append(cost.over(*plain[-2:]))
                    print(f"{feature}: {ratios[feature][-1]}", file=sys.stderr, flush=True)
    return NeighbourFigures(
        machine=Machine.this(),
        model=args.model,
        server_flags=args.server_flags,
        num_neighbours=args.num_neighbours,
        input_len=args.input_len,
        output_len=args.output_len,
        plain_ms=statistics.median(cost.seconds for cost in plain) * 1000,
        ratios={feature: [cost.seconds for cost in costs] for feature, costs in ratios.items()},
        cpu_ratios={
            feature: [cost.cpu_seconds for cost in costs] for feature, costs in ratios.items()
        },
    )


@dataclass(frozen=True, slots=True)
class _Cost:
    """The time between two tokens of the neighbours, and the processor time of a run."""

    seconds: float
    cpu_seconds: float

    def over(self, *others: _Cost) -> _Cost:
        """Returns the ratio of both costs to the means of other runs."""
        return _Cost(
            self.seconds / statistics.mean(other.seconds for other in others),
            self.cpu_seconds / statistics.mean(other.cpu_seconds for other in others),
        )


async def _run(
    server: ServerProcess, body: Callable[[], Body], fields: Body, num_neighbours: int
) -> _Cost:
    """Runs the neighbours and one request with extra fields, and returns the cost."""
    bodies = [*(body() for _ in range(num_neighbours)), body() | fields]
    cpu_seconds = server.cpu_seconds()
    timings = await asyncio.gather(*(stream_completion(HOST, server.port, each) for each in bodies))
    return _Cost(
        seconds_between_tokens(timings[:-1], beside=timings[-1]),
        server.cpu_seconds() - cpu_seconds,
    )


def seconds_between_tokens(neighbours: Sequence[Timing], *, beside: Timing) -> float:
    """Returns the mean time between tokens of the neighbours while all requests decode.

    Args:
      neighbours: timings of the plain requests.
      beside: timing of the other request.

    Raises:
      JaxserveError: the requests never all decode at the same time.
    """
    everybody = [*neighbours, beside]
    begin_s = max(t.first_s for t in everybody)
    end_s = min(t.last_s for t in everybody)
    tokens = sum(t.tokens_at(end_s) - t.tokens_at(begin_s) for t in neighbours)
    if tokens <= 0:
        raise JaxserveError("the completions are too short to overlap; use a larger --output-len")
    return (end_s - begin_s) * len(neighbours) / tokens

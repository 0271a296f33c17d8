"""Two servers that run at the same time and get the same requests in turn.

Both see the same drift of the machine, so the ratio of a pair of runs means more than either run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.program import Body
from jaxserve.bench.server_process import HOST, ServerProcess


@dataclass(frozen=True, slots=True)
class Pairs:
    """The figures of alternating runs of two servers, in order.

    Attributes:
      base_rates, rates: output tokens per second of the runs of the first and the second server,
        all requests together, prefill included.
      cpu_ratios: processor time of the second server, divided by that of the first, of each pair.
    """

    base_rates: list[float]
    rates: list[float]
    cpu_ratios: list[float]

    @property
    def ratios(self) -> list[float]:
        """The rate of the second server, divided by that of the first, of each pair."""
        return [rate / base for base, rate in zip(self.base_rates, self.rates, strict=True)]

    def cells(self) -> str:
        """Formats the medians as cells of a table: both rates, their ratio, the processor time."""
        numbers = (self.base_rates, self.rates, self.ratios, self.cpu_ratios)
        base, rate, ratio, cpu = map(statistics.median, numbers)
        return f"{base:.1f} | {rate:.1f} | {ratio:.2f} | {cpu:.2f}"


def add_pair_flags(parser: argparse.ArgumentParser, *, concurrent: list[int]) -> None:
    """Adds the flags for the runs; ``concurrent`` are the default numbers of requests."""
    parser.add_argument(
        "--concurrent",
        type=int,
        nargs="+",
        default=concurrent,
        help=f"numbers of concurrent requests (default: {' '.join(map(str, concurrent))})",
    )
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")


@contextlib.asynccontextmanager
async def two_servers(
    base_flags: Sequence[str], flags: Sequence[str]
) -> AsyncGenerator[tuple[ServerProcess, ServerProcess], None]:
    """Runs two servers with these flags until the block ends. It begins when both can serve.

    The second starts when the first can serve: an engine that plans drafts measures its steps when
    it starts, which another start at the same time would disturb.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        base = stack.enter_context(ServerProcess(base_flags, log=Path(folder, "base.log")))
        await base.until_healthy()
        second = stack.enter_context(ServerProcess(flags, log=Path(folder, "second.log")))
        await second.until_healthy()
        yield base, second


async def run_pairs(
    base: ServerProcess, second: ServerProcess, bodies: Sequence[Body], repeats: int
) -> Pairs:
    """Sends all ``bodies`` at once to one server and then to the other, ``repeats`` times."""
    runs = [(await _run(base, bodies), await _run(second, bodies)) for _ in range(repeats)]
    return Pairs(
        base_rates=[rate for (rate, _), _ in runs],
        rates=[rate for _, (rate, _) in runs],
        cpu_ratios=[cpu / base_cpu for (_, base_cpu), (_, cpu) in runs],
    )


async def _run(server: ServerProcess, bodies: Sequence[Body]) -> tuple[float, float]:
    """Returns the output tokens per second and the processor time of a run."""
    cpu_seconds = server.cpu_seconds()
    timings = await asyncio.gather(*(stream_completion(HOST, server.port, b) for b in bodies))
    return output_rate(timings), server.cpu_seconds() - cpu_seconds


def output_rate(timings: Sequence[Timing]) -> float:
    """Returns the output tokens per second of a whole run, prefill included."""
    seconds = max(t.last_s for t in timings) - min(t.sent_s for t in timings)
    return sum(t.num_tokens for t in timings) / seconds

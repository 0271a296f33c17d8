"""Starts the server, measures start-up, throughput and memory, and prints a table.

scripts/bench [--model M] [--num-requests N] [--output FILE] [-- SERVER_FLAG...]
scripts/bench front ...         cost of a streamed token in the front process; see its --help
scripts/bench fronts ...        requests per second with several front processes; see its --help
scripts/bench neighbours ...    cost of one request to concurrent requests; see its --help
scripts/bench drafts ...        gain of speculative decoding; see its --help
scripts/bench compare ...       gain or cost of other flags; see its --help
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench import compare, drafts, front, fronts, neighbours
from jaxserve.bench.figures import Figures, LoadFigures, Machine
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.program import add_load_flags, base_parser, body_maker, run
from jaxserve.bench.server_process import HOST, ServerProcess

PROGRAMS = {
    "front": front,
    "fronts": fronts,
    "neighbours": neighbours,
    "drafts": drafts,
    "compare": compare,
}

FIRST_ANSWER_LEN = 8
"""Tokens of the completion that ends the timing of a start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in PROGRAMS:
        return PROGRAMS[argv[0]].main(argv[1:])
    return run(lambda args: asyncio.run(measure(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench", __doc__)
    parser.add_argument(
        "--num-requests", type=int, default=64, help="concurrent requests (default: 64)"
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=5.0,
        help="seconds over which to measure idle processor use (default: 5)",
    )
    parser.add_argument(
        "--skip-cold-start",
        action="store_true",
        help="start only once, with the usual cache of compiled programs",
    )
    add_load_flags(parser, input_len=128, output_len=128)
    return parser


async def measure(args: argparse.Namespace) -> Figures:
    """Starts the server, sends requests, and returns the figures."""
    body = body_maker(args)
    short = {"max_tokens": FIRST_ANSWER_LEN}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        flags = ["--model", args.model, *args.server_flags]
        cold_start_s = None
        if not args.skip_cold_start:
            flags += ["--compilation-cache-dir", f"{folder}/compiled"]
            with ServerProcess(flags, log=log) as server:
                cold_start_s = await _first_answer(server, body() | short)
                _say(f"first completion after {cold_start_s:.1f} s with an empty compilation cache")
        with ServerProcess(flags, log=log) as server:
            warm_start_s = await _first_answer(server, body() | short)
            _say(f"first completion after {warm_start_s:.1f} s with a filled compilation cache")
            alone = LoadFigures.of([await stream_completion(HOST, server.port, body())])
            _say(f"one request: {alone.output_tokens_per_s:.1f} output tokens/s")
            together = LoadFigures.of(
                await _at_once(server, [body() for _ in range(args.num_requests)])
            )
            _say(
                f"{args.num_requests} requests: {together.output_tokens_per_s:.1f} output tokens/s"
            )
            idle_cpu = await _idle_cpu(server, args.idle_seconds)
            memory = server.peak_memory()
    return Figures(
        machine=Machine.this(),
        model=args.model,
        server_flags=args.server_flags,
        input_len=args.input_len,
        output_len=args.output_len,
        cold_start_s=cold_start_s,
        warm_start_s=warm_start_s,
        alone=alone,
        together=together,
        front_peak_bytes=memory.front_bytes,
        engine_peak_bytes=memory.engine_bytes,
        idle_cpu=idle_cpu,
    )


async def _first_answer(server: ServerProcess, body: dict) -> float:
    """Returns the seconds from the start of the command to the end of a first completion."""
    await server.until_healthy()
    timing = await stream_completion(HOST, server.port, body)
    return timing.last_s - server.began_s


async def _at_once(server: ServerProcess, bodies: list[dict]) -> list[Timing]:
    return await asyncio.gather(*(stream_completion(HOST, server.port, b) for b in bodies))


async def _idle_cpu(server: ServerProcess, seconds: float) -> float:
    """Returns the share of one core that the processes use without any request."""
    await asyncio.sleep(1)  # work that the last requests left behind
    before, began_s = server.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    return (server.cpu_seconds() - before) / (time.monotonic() - began_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

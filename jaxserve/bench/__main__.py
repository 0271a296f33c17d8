"""The program: starts the server, measures, prints a table.

scripts/bench [--model M] [--num-requests N] [--output FILE] [-- SERVER_FLAG...]
scripts/bench front ...         what a streamed token costs the front process; see its --help
scripts/bench neighbours ...    what one request costs those beside it; see its --help
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench import front, load, neighbours
from jaxserve.bench.figures import Figures, LoadFigures, Machine
from jaxserve.bench.http import Timing, stream_completion
from jaxserve.bench.program import base_parser, run
from jaxserve.bench.server_process import HOST, ServerProcess

FIRST_ANSWER_LEN = 8
"""Tokens of the answer that a start is timed to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["front"]:
        return front.main(argv[1:])
    if argv[:1] == ["neighbours"]:
        return neighbours.main(argv[1:])
    return run(lambda args: asyncio.run(measure(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = base_parser("scripts/bench", __doc__)
    parser.add_argument("--num-requests", type=int, default=64, help="(default: 64)")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="(default: 5)")
    parser.add_argument(
        "--skip-cold-start",
        action="store_true",
        help="start only once, with the usual cache of compiled programs",
    )
    load.add_flags(parser, input_len=128, output_len=128)
    return parser


async def measure(args: argparse.Namespace) -> Figures:
    """Starts the server, sends requests, and returns what came of it."""
    body = load.body_maker(args)
    short = {"max_tokens": FIRST_ANSWER_LEN}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        flags = ["--model", args.model, *args.server_flags]
        cold_start_s = None
        if not args.skip_cold_start:
            flags += ["--compilation-cache-dir", f"{folder}/compiled"]
            with ServerProcess(flags, log=log) as server:
                cold_start_s = await _first_answer(server, body() | short)
                _say(f"first answer after {cold_start_s:.1f} s, nothing compiled before")
        with ServerProcess(flags, log=log) as server:
            warm_start_s = await _first_answer(server, body() | short)
            _say(f"first answer after {warm_start_s:.1f} s, compiled before")
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
    """Seconds from the start of the command to the end of an answer."""
    await server.until_healthy()
    timing = await stream_completion(HOST, server.port, body)
    return timing.last_s - server.began_s


async def _at_once(server: ServerProcess, bodies: list[dict]) -> list[Timing]:
    return await asyncio.gather(*(stream_completion(HOST, server.port, b) for b in bodies))


async def _idle_cpu(server: ServerProcess, seconds: float) -> float:
    """Part of one core that the processes use when there is nothing to do."""
    await asyncio.sleep(1)  # what the last requests left behind
    before, began_s = server.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    return (server.cpu_seconds() - before) / (time.monotonic() - began_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Measures how many short requests per second one and several front processes serve.

    scripts/bench fronts [--model M] [--fronts N...] [--connections C] [--seconds S] [--output FILE]

The engine is fake: it repeats the prompt. Server, HTTP, chat template and tokenizer are real. Each
connection sends one chat after the other and reads whole replies of a few tokens. The client is one
process; with the engine, the main process and the fronts it shares the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from jaxserve.bench.figures import Machine
from jaxserve.bench.front import TEXT
from jaxserve.bench.http import RequestRefusedError
from jaxserve.bench.program import base_parser, run
from jaxserve.bench.server_process import HOST, POLL_S, ServerProcess

SETTLE_S = 2.0
"""Seconds that all connections run before counting begins."""

NUM_TOKENS = 2
"""Tokens of a reply."""

ROUNDS = 2
"""Measurements of each number of fronts, in turns, as other work comes and goes."""


@dataclass(frozen=True, slots=True)
class FrontsFigures:
    """Figures for one number of fronts, over all rounds.

    Attributes:
      num_fronts: the number of front processes.
      requests_per_s: requests per second, in each round.
      server_cpu: processor time of all processes of the server, in cores.
      client_cpu: processor time of this program, in cores.
    """

    num_fronts: int
    requests_per_s: list[float]
    server_cpu: float
    client_cpu: float


@dataclass(frozen=True, slots=True)
class FrontsReport:
    """The figures of all runs, with the machine and the model whose tokenizer was used."""

    machine: Machine
    model: str
    num_connections: int
    figures: list[FrontsFigures]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}: {self.num_connections} connections",
                "",
                "| fronts | requests/s in each round | server, cores | client, cores |",
                "|---|---|---|---|",
                *map(_line, self.figures),
            ]
        )


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(lambda args: asyncio.run(measure_all(args)), make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench fronts", __doc__)
    parser.add_argument(
        "--fronts",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="numbers of front processes (default: 1 2)",
    )
    parser.add_argument(
        "--connections", type=int, default=64, help="concurrent connections (default: 64)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds to measure each round (default: 10)"
    )
    return parser


async def measure_all(args: argparse.Namespace) -> FrontsReport:
    """Measures every number of fronts, in turns."""
    rounds: dict[int, list[tuple[float, float, float]]] = {count: [] for count in args.fronts}
    for _ in range(ROUNDS):
        for count, found in rounds.items():
            found.append(await _measure(args.model, count, args.connections, args.seconds))
            print(f"{count} fronts: {found[-1][0]:.0f} requests/s", file=sys.stderr, flush=True)
    figures = [
        FrontsFigures(
            count,
            [rate for rate, _, _ in found],
            sum(server for _, server, _ in found) / ROUNDS,
            sum(client for _, _, client in found) / ROUNDS,
        )
        for count, found in rounds.items()
    ]
    return FrontsReport(Machine.this(), args.model, args.connections, figures)


async def _measure(
    model: str, num_fronts: int, num_connections: int, seconds: float
) -> tuple[float, float, float]:
    """Starts a server. Returns requests per second, and the cores of the server and the client."""
    flags = ["--model", model, *_server_flags(num_fronts, num_connections)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with ServerProcess(flags, log=log) as server:
            await server.until_healthy()
            while "Ready" not in log.read_text():  # the first front may be ahead of the others
                await asyncio.sleep(POLL_S)
            return await _load(server, num_connections, seconds)


async def _load(
    server: ServerProcess, num_connections: int, seconds: float
) -> tuple[float, float, float]:
    """Does the work of `_measure` on a server that is ready."""
    load = Load(server.port)
    tasks = [asyncio.create_task(load.send_requests()) for _ in range(num_connections)]

    def now() -> tuple[float, float, float, float]:
        mine = psutil.Process().cpu_times()
        return time.monotonic(), load.num_replies, server.cpu_seconds(), mine.user + mine.system

    try:
        await _sleep(SETTLE_S, tasks)
        before = now()
        await _sleep(seconds, tasks)
        wall_s, *rest = (b - a for a, b in zip(before, now(), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    replies, server_s, client_s = rest
    return replies / wall_s, server_s / wall_s, client_s / wall_s


async def _sleep(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Sleeps while tasks run. Raises the error of the first one that fails."""
    failed, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in failed:
        task.result()


def _server_flags(num_fronts: int, num_connections: int) -> list[str]:
    flags = {
        "api-server-count": num_fronts,
        "engine-factory": "jaxserve.testing.echo_engine:at_1000",
        "max-num-seqs": num_connections,
        "max-num-batched-tokens": 8192,
        "max-model-len": 1024,
        "num-blocks": 1 + num_connections * 1024 // 16,
    }
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


class Load:
    """Sends the same chat again and again, and counts the replies.

    Args:
      port: TCP port of the server.
    """

    def __init__(self, port: int) -> None:
        self.num_replies = 0
        self._port = port
        body = json.dumps(
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": NUM_TOKENS}
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def send_requests(self) -> None:
        """Sends requests over one connection until it is cancelled.

        Raises:
          RequestRefusedError: a reply is an error.
          OSError, asyncio.IncompleteReadError: the connection broke.
        """
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            while True:
                writer.write(self._request)
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                (length,) = (line[15:] for line in lines if line.startswith(b"content-length:"))
                body = await reader.readexactly(int(length))
                if b" 200 " not in lines[0] + b" ":
                    raise RequestRefusedError(body.decode(errors="replace"))
                self.num_replies += 1
        finally:
            writer.close()


def _line(f: FrontsFigures) -> str:
    rates = ", ".join(f"{rate:.0f}" for rate in f.requests_per_s)
    return f"| {f.num_fronts} | {rates} | {f.server_cpu:.2f} | {f.client_cpu:.2f} |"

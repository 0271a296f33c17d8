"""Measures the cost of a streamed token in the front process.

    scripts/bench front [--model M] [--streams N] [--seconds S] [--output FILE]

A fake engine without a model repeats the prompt to every stream at a given pace. Server, HTTP and
tokenizer are real. Each stream is one connection; this program counts its events and closes it when
the time is up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import selectors
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from jaxserve.bench.figures import Machine
from jaxserve.bench.program import base_parser, run
from jaxserve.bench.server_process import HOST, ServerProcess

PACES = (40, 160)
"""Tokens per second of each stream. `testing.echo_engine` has a factory ``at_*`` for each pace."""

TEXT = (
    "The lighthouse had been dark for eleven years when Ana bought it from the harbour office. "
    "She mended the stairs first, because the keeper's cat, who had stayed on, would not be "
    "carried. In spring the lamp turned again, and ships whose captains had only heard of it "
    "slowed down to look. One of them sent a letter: “Your light is two degrees off,” it said, "
    "“but please do not change it; my clock goes by it, and so do my daughter’s piano lessons.”\n\n"
)
"""The prompt, which the engine repeats."""

BODIES = {
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
}
"""Endpoint -> its path, and the field of the body that holds the prompt."""

BLOCK_SIZE = 256

PROMPT_ROOM = 1024
"""Upper bound on the tokens of `TEXT` in a chat template."""

SETTLE_S = 1.0
"""Seconds that all streams run before counting begins."""

MAX_START_S = 30.0
"""Seconds within which all streams must begin."""


@dataclass(frozen=True, slots=True)
class FrontFigures:
    """Figures for a period in which all streams were open.

    Attributes:
      endpoint: a key of `BODIES`.
      pace: tokens per second that the engine generated for each stream.
      tokens_per_s: tokens per second of all streams, as counted by the front.
      events_per_token: SSE events per token; below 1 if events carried several tokens.
      cpu_us_per_token: processor time of the front process (all threads) in microseconds.
      front_cpu, client_cpu: share of one core that the front and this program used.
    """

    endpoint: str
    pace: int
    tokens_per_s: float
    events_per_token: float
    cpu_us_per_token: float
    front_cpu: float
    client_cpu: float


@dataclass(frozen=True, slots=True)
class FrontReport:
    """The figures of all runs, with the machine and the model whose tokenizer was used."""

    machine: Machine
    model: str
    num_streams: int
    figures: list[FrontFigures]

    def table(self) -> str:
        """Formats the figures as a Markdown table."""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}: {self.num_streams} streams",
                "",
                "| | tokens/s | events per token | CPU per token | front, share of one core |",
                "|---|---|---|---|---|",
                *map(_line, self.figures),
            ]
        )


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(measure_all, make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    parser = base_parser("scripts/bench front", __doc__)
    parser.add_argument(
        "--streams", type=int, default=256, help="concurrent streams (default: 256)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds to measure each figure (default: 5)"
    )
    return parser


def measure_all(args: argparse.Namespace) -> FrontReport:
    """Runs `measure` with the parsed flags."""
    figures = measure(args.model, num_streams=args.streams, seconds=args.seconds)
    return FrontReport(Machine.this(), args.model, args.streams, figures)


def measure(model: str, *, num_streams: int, seconds: float) -> list[FrontFigures]:
    """Starts a server for each pace, and measures every endpoint on it."""
    figures = []
    for pace in PACES:
        length = round(pace * (MAX_START_S + SETTLE_S + seconds + 1))  # never reached
        flags = ["--model", model, *_engine_flags(pace, num_streams, length + PROMPT_ROOM)]
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(flags, log=Path(folder, "server.log")) as server,
        ):
            asyncio.run(server.until_healthy())
            for endpoint in BODIES:
                with Streams(server.port, endpoint, num_streams, length) as streams:
                    figures.append(_watch(server, streams, pace, seconds))
                print(_line(figures[-1]), file=sys.stderr, flush=True)
    return figures


def _engine_flags(pace: int, num_streams: int, length: int) -> list[str]:
    """Returns flags for a server that can run all streams to this length at the same time."""
    num_blocks = 1 + num_streams * -(-length // BLOCK_SIZE)
    flags = {
        "engine-factory": f"jaxserve.testing.echo_engine:at_{pace}",
        "max-model-len": length,
        "max-num-seqs": num_streams,
        "max-num-batched-tokens": 8192,
        "block-size": BLOCK_SIZE,
        "num-blocks": num_blocks,
        "max-queue": 2 * num_streams,  # those of the endpoint before may just be ending
    }
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


def _watch(server: ServerProcess, streams: Streams, pace: int, seconds: float) -> FrontFigures:
    """Waits until all streams have begun, then measures them for some seconds."""
    streams.read(until_all_began=True)
    streams.read(seconds=SETTLE_S)
    me = psutil.Process()

    def now() -> tuple[float, ...]:
        mine, front = me.cpu_times(), server.front_cpu_seconds()
        tokens = _tokens_so_far(server.port)
        return time.monotonic(), mine.user + mine.system, front, tokens, streams.num_events

    before = now()
    streams.read(seconds=seconds)
    wall_s, mine_s, front_s, tokens, events = (b - a for a, b in zip(before, now(), strict=True))
    return FrontFigures(
        endpoint=streams.endpoint,
        pace=pace,
        tokens_per_s=tokens / wall_s,
        events_per_token=events / tokens,
        cpu_us_per_token=front_s / tokens * 1e6,
        front_cpu=front_s / wall_s,
        client_cpu=mine_s / wall_s,
    )


def _tokens_so_far(port: int) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as reply:
        page = reply.read().decode()
    found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert found is not None, "the server counts its tokens"
    return float(found[1])


class Streams:
    """Open streams. Counts their events while reading.

    Attributes:
      endpoint: a key of `BODIES`.
      num_events: events of all streams so far.
    """

    def __init__(self, port: int, endpoint: str, num_streams: int, length: int) -> None:
        self.endpoint = endpoint
        self.num_events = 0
        self._not_begun = num_streams
        self._selector = selectors.DefaultSelector()
        path, asked = BODIES[endpoint]
        options = {"max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps(asked | options).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        for _ in range(num_streams):
            stream = _Stream(socket.create_connection((HOST, port)))
            stream.connection.sendall(head.encode() + data)
            self._selector.register(stream.connection, selectors.EVENT_READ, stream)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.connection.close()
        self._selector.close()

    def read(self, *, seconds: float = MAX_START_S, until_all_began: bool = False) -> None:
        """Reads all streams for some seconds.

        Args:
          seconds: how long to read.
          until_all_began: return as soon as every stream has begun.

        Raises:
          ConnectionError: a stream has ended, or with ``until_all_began`` some have not begun.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if until_all_began and not self._not_begun:
                return
            for key, _ in self._selector.select(left_s):
                self._take(key.data)
        if until_all_began:
            raise ConnectionError(f"{self._not_begun} streams have not begun")

    def _take(self, stream: _Stream) -> None:
        data = stream.connection.recv(2**16)
        if not data:
            raise ConnectionError("the server has ended a stream")
        if not stream.has_begun and b"data: " in data:
            stream.has_begun = True
            self._not_begun -= 1
        # An event ends with two newlines, which may arrive in two reads.
        self.num_events += data.count(b"\n\n") + (stream.last == b"\n" and data[:1] == b"\n")
        stream.last = data[-1:]


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    has_begun: bool = False
    last: bytes = b""


def _line(f: FrontFigures) -> str:
    return (
        f"| {f.endpoint}, {f.pace} tokens/s per stream | {f.tokens_per_s:.0f} | "
        f"{f.events_per_token:.2f} | {f.cpu_us_per_token:.1f} µs | {f.front_cpu:.0%} |"
    )

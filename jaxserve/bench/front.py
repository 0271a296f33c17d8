"""What a streamed token costs the front process.

    scripts/bench front [--model M] [--streams N] [--seconds S] [--output FILE]

The engine is a stand-in without a model, which repeats the prompt to every stream at a given pace.
All else is real: the server, its HTTP, the tokenizer. Each stream is a connection, which is read
and counted here, and closed when the time is up.
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
"""Tokens a second for each stream, as the factories ``at_*`` of `testing.echo_engine` have it."""

TEXT = (
    "The lighthouse had been dark for eleven years when Ana bought it from the harbour office. "
    "She mended the stairs first, because the keeper's cat, who had stayed on, would not be "
    "carried. In spring the lamp turned again, and ships whose captains had only heard of it "
    "slowed down to look. One of them sent a letter: “Your light is two degrees off,” it said, "
    "“but please do not change it; my clock goes by it, and so do my daughter’s piano lessons.”\n\n"
)
"""What is repeated."""

BODIES = {
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
}
"""Endpoint -> path and the part of the body that asks for it."""

BLOCK_SIZE = 256

PROMPT_ROOM = 1024
"""Tokens that are enough for the text in a chat template."""

SETTLE_S = 1.0
"""How long all streams run before anything is counted."""

MAX_START_S = 30.0
"""How long it may take until all streams run."""


@dataclass(frozen=True, slots=True)
class FrontFigures:
    """Of a time in which all streams were open.

    Attributes:
      endpoint: a key of `BODIES`.
      pace: tokens a second that the engine made for each stream.
      tokens_per_s: of all streams, as the front counted.
      events_per_token: less than 1 where tokens were sent together.
      cpu_us_per_token: processor time of the front process, all of its threads.
      front_cpu, client_cpu: part of one core that the front, and this program, used.
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
    """What was measured, on which machine, with the tokenizer of which model."""

    machine: Machine
    model: str
    num_streams: int
    figures: list[FrontFigures]

    def table(self) -> str:
        """A table in Markdown."""
        return "\n".join(
            [
                str(self.machine),
                f"{self.model}: {self.num_streams} streams",
                "",
                "| | tokens/s | events a token | CPU a token | front, part of one core |",
                "|---|---|---|---|---|",
                *map(_line, self.figures),
            ]
        )


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    return run(measure_all, make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = base_parser("scripts/bench front", __doc__)
    parser.add_argument("--streams", type=int, default=256, help="(default: 256)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure (default: 5)")
    return parser


def measure_all(args: argparse.Namespace) -> FrontReport:
    """What the program measures."""
    figures = measure(args.model, num_streams=args.streams, seconds=args.seconds)
    return FrontReport(Machine.this(), args.model, args.streams, figures)


def measure(model: str, *, num_streams: int, seconds: float) -> list[FrontFigures]:
    """Starts a server for each pace, and measures every endpoint."""
    figures = []
    for pace in PACES:
        length = round(pace * (MAX_START_S + SETTLE_S + seconds + 1))  # which is never reached
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
    """The flags of a server whose streams can all be so long at the same time."""
    num_blocks = 1 + num_streams * -(-length // BLOCK_SIZE)
    flags = {
        "engine-factory": f"jaxserve.testing.echo_engine:at_{pace}",
        "max-model-len": length,
        "max-num-seqs": num_streams,
        "max-num-batched-tokens": 8192,
        "block-size": BLOCK_SIZE,
        "num-blocks": num_blocks,
        "max-queue": num_streams,
    }
    return [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]


def _watch(server: ServerProcess, streams: Streams, pace: int, seconds: float) -> FrontFigures:
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
    """Open streams, whose events are counted as they are read.

    Attributes:
      endpoint: a key of `BODIES`.
      num_events: so far, of all streams.
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
        """Reads what comes in the next ``seconds``.

        Raises:
          ConnectionError: a stream has ended, or not all have begun.
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
        # An event ends with an empty line, whose two bytes may come one by one.
        self.num_events += data.count(b"\n\n") + (stream.last == b"\n" and data[:1] == b"\n")
        stream.last = data[-1:]


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    has_begun: bool = False
    last: bytes = b""


def _line(f: FrontFigures) -> str:
    return (
        f"| {f.endpoint}, {f.pace} tokens/s a stream | {f.tokens_per_s:.0f} | "
        f"{f.events_per_token:.2f} | {f.cpu_us_per_token:.1f} µs | {f.front_cpu:.0%} |"
    )

"""Streams of many kinds at once, compared with what they are alone; with or without faults.

    python -m jaxserve.bench.stress --seconds 120 --streams 200 --faults
    python -m jaxserve.bench.stress --num-requests 20000 --streams 64

Starts a server with two engines and a tiny random model in float32. With ``--faults``, engines are
killed, stopped and made to raise at random. Every stream must end with the text that it has alone.
Afterwards no request, block, process, descriptor or memory may be left. Needs the extra ``dev``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxserve.bench.held import Held, children_of
from jaxserve.bench.server_process import ServerProcess
from jaxserve.testing.tiny import write_checkpoint

FLAGS = (
    *("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
    *("--num-blocks", "64", "--data-parallel-size", "2", "--log-stats-interval", "0"),
    *("--engine-timeout", "3", "--max-engine-restarts", "1000"),
)
FAULTY = ("--engine-factory", "jaxserve.testing.faulty_engine:build")
NUM_ENGINES = 2

CRASHED_TWICE = re.compile(r"the engine failed \d+ times while it was running this request")
GAUGE = re.compile(
    r"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc){.*} (.*)$", re.M
)

IDLE_TIMEOUT_S = 120
"""Seconds to wait for engines that are being restarted at the end: the last delay is up to 60 s."""

REFUSED_PAUSE_S = 0.2
"""Seconds before a stream tries again while no engine can serve."""


@dataclass
class Choice:
    """One completion: its text, its finish reason and the number of its log probabilities."""

    text: str = ""
    finish_reason: str | None = None
    num_logprobs: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        """Adds a choice of an event."""
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"]
        self.num_logprobs += len((choice["logprobs"] or {"tokens": ()})["tokens"])


Answer = dict[int, Choice]


class Failed(Exception):
    """A request has no right answer. ``outcome``: see `Tally`."""

    def __init__(self, outcome: str, message: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass
class Tally:
    """The outcomes of requests.

    Attributes:
      outcomes: how many requests had each outcome: "answered"; "refused" with 503 while no engine
        could serve; "crashed twice", which may happen under faults; "wrong" or "lost", which may
        not.
      complaints: what was wrong, at most a few. Empty if all is well.
      injuries: what was done to engines, and how often.
      longest_gap_s: the longest wait for the next event of a stream.
      before, after: the state of the idle server after the warm-up, and at the end.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    injuries: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    before: Held | None = None
    after: Held | None = None

    def add_failure(self, failed: Failed) -> None:
        """Counts a request without the right answer."""
        self.outcomes[failed.outcome] += 1
        if failed.outcome in ("wrong", "lost") and len(self.complaints) < 5:
            self.complaints.append(str(failed))


@dataclass(frozen=True)
class Job:
    """The amount of work: ``seconds`` or ``num_requests``, in ``num_streams`` at once.

    ``num_fronts``: the number of front processes of the server.
    """

    num_streams: int
    seconds: float | None
    num_requests: int | None
    faults: bool
    seed: int
    num_fronts: int = 1


def make_requests(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Returns streamed completions of many kinds."""
    rng = random.Random(seed)
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 1.0, "n": 2},
        {"temperature": 1.0, "stop": ["a", "ing"], "min_tokens": 5},
        {"temperature": 0.7, "top_p": 0.9, "logit_bias": {"9": 3.0}, "bad_words": ["the"]},
        {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{20,60}"}},
    ]
    return [
        {
            "prompt": [rng.randrange(1, 250) for _ in range(rng.randrange(1, 90))],
            "max_tokens": rng.randrange(5, 120),
            "seed": i,
            "stream": True,
            **kinds[i % len(kinds)],
        }
        for i in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> Answer:
    """Returns the answer to a request. Raises Failed."""
    answer: Answer = defaultdict(Choice)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == 503:
                raise Failed("refused")
            if reply.status_code != 200:
                raise _failure(f"status {reply.status_code}: {(await reply.aread()).decode()}")
            before_s = time.monotonic()
            async for line in reply.aiter_lines():
                now_s = time.monotonic()
                tally.longest_gap_s = max(tally.longest_gap_s, now_s - before_s)
                before_s = now_s
                if line == "data: [DONE]":
                    return answer
                if line.startswith("data: "):
                    _add_event(answer, json.loads(line.removeprefix("data: ")))
    except httpx.TransportError as error:
        raise Failed("lost", repr(error)) from error
    raise Failed("lost", "the stream ended without [DONE]")


def _failure(message: str) -> Failed:
    return Failed("crashed twice" if CRASHED_TWICE.search(message) else "lost", message)


def _add_event(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise _failure(event["error"]["message"])
    for choice in event["choices"]:
        answer[choice["index"]].add(choice)


async def run_streams(
    client: httpx.AsyncClient,
    requests: Sequence[dict[str, Any]],
    answers: Sequence[Answer],
    job: Job,
    tally: Tally,
) -> None:
    """Keeps streams running until the job is done, and compares every answer."""
    numbers, began_s = itertools.count(), time.monotonic()

    def is_over(number: int) -> bool:
        if job.seconds is not None:
            return time.monotonic() - began_s >= job.seconds
        return number >= (job.num_requests or 0)

    async def stream() -> None:
        while not is_over(number := next(numbers)):
            k = number % len(requests)
            try:
                answer = await ask(client, requests[k], tally)
                if answer != answers[k]:
                    raise Failed("wrong", f"expected {answers[k]}, got {answer}")
                tally.outcomes["answered"] += 1
            except Failed as failed:
                tally.add_failure(failed)
                if failed.outcome == "refused":
                    await asyncio.sleep(REFUSED_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(job.num_streams):
            group.create_task(stream())


async def injure(front: psutil.Process, rng: random.Random, injuries: Counter[str]) -> None:
    """Kills or stops an engine every few seconds, until it is cancelled."""
    while True:
        await asyncio.sleep(rng.uniform(2, 8))
        with contextlib.suppress(psutil.Error, IndexError):
            victim = rng.choice(children_of(front, "jaxserve.engine.process"))
            what = rng.choice(["killed", "stopped"])
            victim.kill() if what == "killed" else victim.suspend()
            injuries[what] += 1


async def until_idle(client: httpx.AsyncClient) -> None:
    """Waits until every engine serves, and holds neither requests nor blocks."""
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        while True:
            if (await client.get("/health")).status_code == 200:
                values = GAUGE.findall((await client.get("/metrics")).text)
                assert len(values) == 3 * NUM_ENGINES, values
                if not any(map(float, values)):
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _served(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[ServerProcess, httpx.AsyncClient]]:
    """Runs a server with the model in ``folder``; yields it and a client for it."""
    places = ["--model", str(folder / "tiny"), "--compilation-cache-dir", str(folder / "compiled")]
    with ServerProcess([*places, *FLAGS, *flags], log=folder / "log") as process:
        await process.until_healthy()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{process.port}",
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        ) as client:
            yield process, client


async def stress(folder: Path, job: Job) -> Tally:
    """Runs a job on a server whose files are in ``folder``."""
    write_checkpoint(folder / "tiny")
    requests, tally = make_requests(64, seed=job.seed), Tally()
    async with _served(folder) as (_, client):
        answers = [await ask(client, request, Tally()) for request in requests]
    flags = ("--api-server-count", str(job.num_fronts), *(FAULTY if job.faults else ()))
    async with _served(folder, *flags) as (process, client):
        front = psutil.Process(process.pid)
        warm_up = dataclasses.replace(job, seconds=None, num_requests=10 * job.num_streams)
        await run_streams(client, requests, answers, warm_up, tally)
        await until_idle(client)
        tally.before = Held.by(front)
        async with asyncio.TaskGroup() as group:
            if job.faults:
                injuring = injure(front, random.Random(job.seed), tally.injuries)
                injuries = group.create_task(injuring)
            await run_streams(client, requests, answers, job, tally)
            if job.faults:
                injuries.cancel()
        await until_idle(client)
        tally.after = Held.by(front)
        if not tally.after.is_within(tally.before):
            tally.complaints.append(f"left over: {tally.before} before, {tally.after} after")
    return tally


def main() -> int:
    """Runs the job that the command line describes. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    job = Job(args.streams, args.seconds, args.num_requests, args.faults, args.seed, args.fronts)
    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(stress(Path(folder), job))
    for name, value in vars(tally).items():
        print(f"{name}: {value}")
    return int(bool(tally.complaints))


if __name__ == "__main__":
    sys.exit(main())

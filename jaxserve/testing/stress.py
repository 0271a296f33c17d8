"""Streams of many kinds at once, compared with what they are alone; with or without faults.

    python -m jaxserve.testing.stress --seconds 120 --streams 200 --faults
    python -m jaxserve.testing.stress --num-requests 20000 --streams 64

Starts a server with two engines and a tiny random model in float32. With ``--faults``, engines are
killed, stopped and made to raise at random. Every stream must end with the text that it would have
alone; afterwards no request, block, process or descriptor may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxserve.bench.server_process import ServerProcess
from jaxserve.testing.tiny import write_checkpoint
from jaxserve.testing.waiting import until

FLAGS = (
    "--dtype=float32 --max-num-seqs=8 --max-num-batched-tokens=32 --num-blocks=64 "
    "--data-parallel-size=2 --engine-timeout=3 --max-engine-restarts=1000 --log-stats-interval=0"
).split()
FAULTY = ["--engine-factory", "jaxserve.testing.faulty_engine:build"]

CRASHED_TWICE = re.compile(r"the engine failed \d+ times while it was running this request")

Answer = tuple[tuple[str, str | None, int], ...]
"""For each completion: its text, its finish reason and the number of its log probabilities."""


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
      outcomes: how many requests had each outcome: "answered"; "refused" while no engine could
        serve, before anything was promised; "crashed twice", which may happen under faults; "wrong"
        or "lost", which may not.
      complaints: what was wrong, at most a few.
      longest_gap_s: the longest time without a token in a stream that had begun.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0

    def complain(self, outcome: str, text: str) -> None:
        """Counts a request that had an outcome that may not happen."""
        self.outcomes[outcome] += 1
        if len(self.complaints) < 5:
            self.complaints.append(text)


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
            "max_tokens": rng.randrange(1, 120),
            "seed": i,
            "stream": True,
            **kinds[i % len(kinds)],
        }
        for i in range(count)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> Answer | None:
    """Returns the answer to a request; None, and an outcome in the tally, if there is none."""
    texts, reasons, counts = Counter[int](), dict[int, str | None](), Counter[int]()
    parts: dict[int, str] = {}
    del texts
    is_done, before_s = False, None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == 503:
                tally.outcomes["refused"] += 1
                return None
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now_s = time.monotonic()
                if before_s is not None:
                    tally.longest_gap_s = max(tally.longest_gap_s, now_s - before_s)
                before_s = now_s
                if line == "data: [DONE]":
                    is_done = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    message = event["error"]["message"]
                    if CRASHED_TWICE.search(message):
                        tally.outcomes["crashed twice"] += 1
                    else:
                        tally.complain("lost", message)
                    return None
                for choice in event["choices"]:
                    index = choice["index"]
                    parts[index] = parts.get(index, "") + choice["text"]
                    reasons[index] = choice["finish_reason"]
                    if choice.get("logprobs"):
                        counts[index] += len(choice["logprobs"]["tokens"])
    except httpx.TransportError as error:
        tally.complain("lost", repr(error))
        return None
    if not is_done:
        tally.complain("lost", "the stream ended without [DONE]")
        return None
    return tuple((parts[i], reasons[i], counts[i]) for i in sorted(parts))

"""A minimal HTTP client for load generators, which costs little processor time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import JaxserveError


class RequestRefusedError(JaxserveError):
    """The server answered with an error."""


@dataclass(slots=True)
class Timing:
    """The arrival times of the tokens of one completion, by `time.monotonic`.

    Attributes:
      sent_s: time at which the request was sent.
      arrivals: (time, tokens so far) for each event with new tokens.
      num_prompt_tokens: prompt tokens as counted by the server.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0

    @property
    def first_s(self) -> float:
        """The time of the first token."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """The time of the last token."""
        return self.arrivals[-1][0]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the completion."""
        return self.arrivals[-1][1]

    def tokens_at(self, time_s: float) -> int:
        """Returns the number of tokens that had arrived by a time."""
        return max((count for when, count in self.arrivals if when <= time_s), default=0)


async def get_status(host: str, port: int, path: str) -> int | None:
    """Returns the status of a GET request, or None if the port cannot be reached."""
    try:
        async with _connection(host, port) as (reader, writer):
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            )
            return _status(await reader.readline())
    except OSError:
        return None


async def stream_completion(host: str, port: int, body: Mapping[str, Any]) -> Timing:
    """Streams a body from /v1/completions and records when its tokens arrive.

    Raises:
      RequestRefusedError: the server answered with an error, or the stream ended early.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    data = json.dumps({**body, "stream": True, "stream_options": options}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    async with _connection(host, port) as (reader, writer):
        timing = Timing(time.monotonic())
        writer.write(head.encode() + data)
        status = _status(await reader.readline())
        if status != 200:
            rest = (await reader.read(4096)).decode(errors="replace")
            raise RequestRefusedError(f"status {status}: {rest}")
        # All lines but events are headers and chunk sizes.
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return timing
            _record(timing, json.loads(line[6:]))
    raise RequestRefusedError("the stream ended early")


def _record(timing: Timing, event: dict[str, Any]) -> None:
    if "error" in event:
        raise RequestRefusedError(str(event["error"]))
    usage = event["usage"]
    count = usage["completion_tokens"]
    if count > (timing.num_tokens if timing.arrivals else 0):
        timing.arrivals.append((time.monotonic(), count))
    timing.num_prompt_tokens = usage["prompt_tokens"]


@asynccontextmanager
async def _connection(host: str, port: int):
    reader, writer = await asyncio.open_connection(host, port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.close()


def _status(line: bytes) -> int | None:
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 else None

"""Compares this machine with the one on which limits of processor time were measured."""

from __future__ import annotations

import time

import msgspec

REFERENCE_S = 0.0064
"""Processor time of `_work` where the limits were measured, in the best try."""

NUM_TRIES = 10

_BODY = msgspec.json.encode(
    [{"id": i, "text": "hello world", "ids": [i] * 10} for i in range(4000)]
)


def slowness() -> float:
    """Returns how many times longer Python code takes here than there, at least 1.

    Multiply a limit of processor time by it, so that a test does not depend on the machine.
    """
    times = []
    for _ in range(NUM_TRIES):
        began = time.thread_time()
        _work()
        times.append(time.thread_time() - began)
    return max(min(times) / REFERENCE_S, 1.0)


def _work() -> int:
    """Decodes JSON, runs Python code and encodes JSON, as the front does for a large request."""
    total = 0
    for item in msgspec.json.decode(_BODY):
        for token_id in item["ids"]:
            total += token_id * len(item["text"])
        total += len(msgspec.json.encode(item))
    return total

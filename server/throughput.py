"""Logs the throughput and the load of each engine every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from jaxserve.ipc.messages import StepStats

logger = logging.getLogger(__name__)

IDLE = StepStats()


class HasStats(Protocol):
    """Whoever knows the latest state of each engine, by its index."""

    @property
    def stats(self) -> Mapping[int, StepStats]: ...


def describe(engine: int, before: StepStats, now: StepStats, seconds: float) -> str | None:
    """Returns the line for one engine, or None if it has been idle all the time.

    Args:
      engine: index of the engine.
      before: its state ``seconds`` ago.
      now: its current state.
      seconds: the interval over which throughput is averaged, > 0.
    """
    prompt = (now.total_prompt_tokens - before.total_prompt_tokens) / seconds
    generated = (now.total_generation_tokens - before.total_generation_tokens) / seconds
    if not (prompt or generated or now.num_running or now.num_waiting):
        return None
    preemptions = now.total_preemptions - before.total_preemptions
    drafts = now.total_draft_tokens - before.total_draft_tokens
    accepted = sum(now.accepted_per_position) - sum(before.accepted_per_position)
    return (
        f"Engine {engine:03d}: "
        f"Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generated:.1f} tokens/s, "
        f"Running: {now.num_running} reqs, Waiting: {now.num_waiting} reqs, "
        + (f"Preemptions: {preemptions}, " if preemptions else "")
        + (f"Drafts accepted: {accepted} of {drafts}, " if drafts else "")
        + f"KV cache usage: {now.kv_usage:.1%}"
    )


async def log_throughput(engines: HasStats, *, interval_s: float) -> None:
    """Logs a line for each busy engine every ``interval_s`` seconds, until it is cancelled."""
    loop = asyncio.get_running_loop()
    before: Mapping[int, StepStats] = dict(engines.stats)
    then = loop.time()
    while True:
        await asyncio.sleep(interval_s)
        now, moment = dict(engines.stats), loop.time()
        for index, stats in now.items():
            line = describe(index, before.get(index, IDLE), stats, moment - then)
            if line is not None:
                logger.info(line)
        before, then = now, moment

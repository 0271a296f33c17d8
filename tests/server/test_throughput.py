"""The log line about the throughput of each engine."""

import asyncio
import logging

import pytest

from jaxserve.ipc.messages import StepStats
from jaxserve.testing.waiting import until
from server.throughput import describe, log_throughput


def test_the_line_covers_the_time_since_the_last_line() -> None:
    before = StepStats(total_prompt_tokens=100, total_generation_tokens=50)
    now = StepStats(
        num_running=3,
        num_waiting=1,
        kv_usage=0.125,
        total_prompt_tokens=600,
        total_generation_tokens=75,
        total_preemptions=2,
    )
    assert describe(2, before, now, 10.0) == (
        "Engine 002: Avg prompt throughput: 50.0 tokens/s, "
        "Avg generation throughput: 2.5 tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, Preemptions: 2, "
        "KV cache usage: 12.5%"
    )


def test_an_idle_engine_has_no_line() -> None:
    stats = StepStats(total_prompt_tokens=100, total_generation_tokens=50)
    assert describe(0, stats, stats, 10.0) is None
    waiting = StepStats(total_prompt_tokens=100, total_generation_tokens=50, num_waiting=1)
    assert "Waiting: 1" in (describe(0, stats, waiting, 10.0) or "")


class Busy:
    """An engine that has generated more tokens each time its stats are read."""

    total = 0

    @property
    def stats(self) -> dict[int, StepStats]:
        self.total += 100
        return {0: StepStats(total_generation_tokens=self.total)}


async def test_lines_are_logged_periodically(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    task = asyncio.create_task(log_throughput(Busy(), interval_s=0.001))
    await until(lambda: len(caplog.records) >= 2)
    task.cancel()
    assert all("Avg generation throughput" in record.message for record in caplog.records)


def test_the_line_counts_drafts() -> None:
    before = StepStats(total_draft_tokens=10, accepted_per_position=(3, 1))
    now = StepStats(num_running=1, total_draft_tokens=24, accepted_per_position=(9, 4))
    line = describe(0, before, now, 10.0)
    assert line is not None
    assert "Drafts accepted: 9 of 14, KV cache usage" in line
    line = describe(0, now, now, 10.0)
    assert line is not None
    assert "Drafts" not in line

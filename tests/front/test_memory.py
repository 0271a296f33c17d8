"""Freed memory goes back to the system after large work, off the event loop."""

import asyncio
import threading

import pytest

from jaxserve.front import memory
from jaxserve.front.memory import LARGE, FreedMemory
from jaxserve.testing.waiting import until


@pytest.fixture
def trims(monkeypatch):
    """The threads in which memory was returned."""
    monkeypatch.setattr(memory, "DELAY_S", 0.01)
    return []


@pytest.fixture
def freed(trims):
    freed = FreedMemory()
    freed._trim = lambda padding: trims.append(threading.current_thread()) or 1
    return freed


async def test_memory_is_returned_once_after_large_work_in_a_thread(freed, trims) -> None:
    for _ in range(5):
        freed.after(LARGE)
    await until(lambda: trims)
    assert len(trims) == 1
    assert trims[0] is not threading.main_thread()
    freed.after(LARGE)
    await until(lambda: len(trims) == 2)


async def test_small_work_returns_nothing(freed, trims) -> None:
    freed.after(LARGE - 1)
    assert freed._timer is None
    await asyncio.sleep(0)
    assert trims == []


async def test_without_glibc_nothing_happens(monkeypatch) -> None:
    freed = FreedMemory()
    freed._trim = None
    freed.after(LARGE)
    assert freed._timer is None

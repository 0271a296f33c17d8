"""Aborts that go to another process, and their replies."""

import asyncio

from jaxserve.ipc.control import Aborted
from server.abort_calls import AbortCalls


async def test_each_call_gets_its_own_reply():
    sent = []
    calls = AbortCalls(sent.append)
    both = asyncio.gather(calls.abort("a"), calls.abort(None))
    await asyncio.sleep(0)
    assert [message.request_id for message in sent] == ["a", None]
    calls.handle(Aborted(sent[1].call, 2))
    calls.handle(Aborted(sent[0].call, 1))
    calls.handle(Aborted(sent[0].call, 9))  # a second reply changes nothing
    assert await both == [1, 2]
    calls.handle(Aborted(sent[0].call, 9))


async def test_a_process_that_does_not_reply_has_aborted_nothing():
    assert await AbortCalls(lambda _: None, timeout_s=0).abort("a") == 0


async def test_a_process_that_ends_has_aborted_nothing():
    calls = AbortCalls(lambda _: None)
    call = asyncio.create_task(calls.abort("a"))
    await asyncio.sleep(0)
    calls.close()
    assert await call == 0

"""Large replies and events are encoded and sent in pieces, while other requests continue."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest
from starlette.requests import Request

from jaxserve.front.memory import FreedMemory
from jaxserve.openai.encoding import fits
from jaxserve.openai.protocol import Completion, CompletionChoice, CompletionLogprobs
from jaxserve.openai.responses_protocol import MessageItem, OutputText, TextLogprob, TopLogprob
from server.sse import FRAMINGS, EventStream, reply_whole

NUM_TOKENS = 20_000


def completion(num_tokens: int) -> Completion:
    logprobs = CompletionLogprobs(
        text_offset=list(range(num_tokens)),
        token_logprobs=[-0.5] * num_tokens,
        tokens=["tok"] * num_tokens,
        top_logprobs=[{"tok": -0.5, "kot": -1.5} for _ in range(num_tokens)],
    )
    choice = CompletionChoice(index=0, text="tok" * num_tokens, logprobs=logprobs)
    head: dict[str, Any] = {"id": "x", "created": 1, "model": "m", "system_fingerprint": "f"}
    return Completion(object="text_completion", choices=[choice], **head)


def item(num_tokens: int) -> MessageItem:
    entry = TextLogprob("tok", -0.5, [1, 2], [TopLogprob("tok", -0.5, [1, 2])] * 2)
    return MessageItem("x", content=[OutputText("tok", logprobs=[entry] * num_tokens)])


async def never() -> Any:
    await asyncio.Event().wait()


async def sent_by(response: Any) -> tuple[dict[str, Any], list[bytes], int]:
    """Returns the start message, the parts of the body, and how often another task ran."""
    messages: list[dict[str, Any]] = []
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def send(message: Any) -> None:
        messages.append(message)

    running = asyncio.create_task(other())
    scope = {"type": "http", "extensions": {}}
    if asyncio.iscoroutine(response):
        response = await response
    await response(scope, never, send)
    running.cancel()
    start, *parts = messages
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    return start, [part["body"] for part in parts], turns


@pytest.mark.parametrize("make", [completion, item])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
async def test_a_whole_reply_has_a_length_and_comes_in_pieces_if_it_is_large(
    make, num_tokens
) -> None:
    expected = msgspec.json.encode(make(num_tokens))
    request = Request({"type": "http", "headers": []}, never)

    async def body() -> msgspec.Struct:
        return make(num_tokens)

    memory = Mock(FreedMemory)
    start, parts, turns = await sent_by(reply_whole(request, body(), memory))
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(expected)
    assert b"".join(parts) == expected
    assert (len(parts) == 1) == (num_tokens == 1)
    if num_tokens > 1:
        assert max(map(len, parts)) < 2**20
        assert turns > 5
        memory.after.assert_called_once_with(len(expected))


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("make", [completion, item])
async def test_a_large_event_is_the_same_as_in_one_piece(framing, make) -> None:
    form = FRAMINGS[framing]
    chunks = [make(n) for n in (1, NUM_TOKENS, 2, NUM_TOKENS)]
    for order in (chunks, chunks[1:]):

        async def rest(order: list[msgspec.Struct] = order) -> AsyncGenerator[msgspec.Struct, None]:
            for chunk in order[1:]:
                yield chunk

        memory = Mock(FreedMemory)
        _, parts, turns = await sent_by(EventStream(order[0], rest(), memory, form))
        large = [call(len(msgspec.json.encode(chunk))) for chunk in order if not fits(chunk)]
        assert len(large) == 2
        assert memory.after.call_args_list == large
        assert b"".join(parts) == b"".join(map(form.event, order)) + form.end
        assert max(map(len, parts)) < 2**20
        assert turns > 10

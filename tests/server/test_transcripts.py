"""Streams compared byte by byte with recorded transcripts, and read by the real client.

``python tests/server/test_transcripts.py`` records the transcripts again: review the difference.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxserve.front.text_engine import TextEngine
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.state import ServerState

FOLDER = Path(__file__).with_name("transcripts")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> <think> #}"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOL = {"name": "weather", "parameters": {"type": "object"}}
USAGE = {"stream_options": {"include_usage": True}}

TEXTS = {
    "plain": "hello é world",
    "stop": "hello world, the end",
    "length": "hello world",
    "two": "hello world",
    "error": "hello world",
    "reasoning": "<think>hello</think>world",
    "tool": "hello " + CALL,
    "logprobs": "he",
}
FIELDS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["world, t"]},
    "length": {"max_tokens": 1},
    "two": {"n": 2, "seed": 1},
}
CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "plain": USAGE,
    "tool": {"tools": [{"type": "function", "function": TOOL}]},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}
COMPLETION_FIELDS: dict[str, dict[str, Any]] = {
    "plain": USAGE,
    "two": {"echo": True},
    "logprobs": {"logprobs": 2, "echo": True},
}
RESPONSE_FIELDS: dict[str, dict[str, Any]] = {
    "tool": {"tools": [{"type": "function", "strict": False, **TOOL}]},
    "logprobs": {"top_logprobs": 2},
    "length": {"max_tokens": None, "max_output_tokens": 1},
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {}
for case in TEXTS:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    more = FIELDS.get(case, {})
    CASES[f"chat_{case}"] = ("chat", case, messages | more | CHAT_FIELDS.get(case, {}))
    if case not in ("tool", "reasoning"):
        body = {"prompt": "hi", **more, **COMPLETION_FIELDS.get(case, {})}
        CASES[f"completion_{case}"] = ("completion", case, body)
    if case != "two":
        body = {"input": "hi", **more, **RESPONSE_FIELDS.get(case, {})}
        CASES[f"response_{case}"] = ("response", case, body)
PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
}


def make_client(case: str) -> httpx.AsyncClient:
    text_engine: TextEngine = scripted_text_engine(TEXTS[case], chat_template=TEMPLATE)
    if case == "error":
        text_engine.engine.fail_after = 1
    transport = httpx.ASGITransport(create_app(ServerState(text_engine)))
    return httpx.AsyncClient(transport=transport)


def normalized(transcript: str) -> str:
    """Replaces the parts of a transcript that differ between runs."""
    for pattern, text in (
        (r'"created(_at)?":\d+', r'"created\1":0'),
        (r"jaxserve-[\w.]+-[0-9a-f]{8}", "FINGERPRINT"),
        (r"\b(call|fc|msg|rs)_[0-9a-f]{24}", r"\1_ID"),
    ):
        transcript = re.sub(pattern, text, transcript)
    return transcript


async def record(name: str) -> str:
    kind, case, body = CASES[name]
    async with make_client(case) as client:
        response = await client.post(
            f"http://test{PATHS[kind]}",
            json=body | {"stream": True},
            headers={"x-request-id": "abc"},
        )
    assert response.status_code == 200, response.text
    return normalized(response.text)


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_matches_its_transcript(name) -> None:
    assert await record(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_transcript_belongs_to_a_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == CASES.keys()


async def read_chat(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    text = ""
    async for chunk in await client.chat.completions.create(**body):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            text += getattr(choice.delta, "reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                text += (call.function.name or "") + call.function.arguments
    return text


async def read_completion(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    text = ""
    async for chunk in await client.completions.create(**body):
        text += "".join(choice.text for choice in chunk.choices)
    return text


async def read_response(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    text = ""
    extra_body = {key: body.pop(key) for key in ("stop", "max_tokens") if key in body}
    async for event in await client.responses.create(**body, extra_body=extra_body):
        if event.type == "response.failed":
            raise openai.APIError(event.response.error.message, None, body=None)
        if event.type == "response.output_item.added" and event.item.type == "function_call":
            text += event.item.name
        text += event.delta if event.type.endswith(".delta") else ""
    return text


READERS: dict[str, Callable[..., Any]] = {
    "chat": read_chat,
    "completion": read_completion,
    "response": read_response,
}
EXPECTED = {
    "plain": "hello é world",
    "stop": "hello ",
    "length": "hello",
    "reasoning": "helloworld",
    "tool": 'helloweather{"city": "Rome"}',
    "logprobs": "he",
}


@pytest.mark.parametrize("name", CASES)
async def test_the_real_client_reads_every_stream(name) -> None:
    kind, case, body = CASES[name]
    async with make_client(case) as http:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=http, max_retries=0
        )
        read = READERS[kind](client, {"model": "tiny", "stream": True} | body)
        if case == "error":
            with pytest.raises(openai.APIError, match="told to fail"):
                await read
        elif case == "two":
            text = await read
            assert sorted(text) == sorted("hello world" * 2 + ("hihi" if kind != "chat" else ""))
        else:
            echo = "hi" if body.get("echo") else ""
            assert await read == echo + EXPECTED[case]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in CASES:
        path = FOLDER / f"{each}.txt"
        path.write_text(asyncio.run(record(each)), encoding="utf-8")

"""Odd values in every field of every body never cause a server error."""

import json
import random
import typing
from typing import Any

import pytest

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.routes.openapi import POSTS
from server.state import ServerState

TEMPLATE = (
    "{# <tool_call> <think> #}{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {}}}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 20, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**64)),
    *("", "a", "auto", "none", "required", "text", "\x00", "é🔥", "x" * 3000, "{", "[0-9]+", "("),
    *([], [[]], [1], [1, 2], ["a"], [""], [None], [{}], [[1], ["a"]], [1, "a"]),
    *({}, {"a": 1}, {"1": 5}, {"type": "function"}, {"type": "json_object"}, {"effort": "low"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
    {"type": "function", "function": {"name": "f"}},
    [TOOL],
    {"include_usage": True},
    [{"role": "user", "content": "hi"}],
    [{"role": "assistant", "content": None, "tool_calls": [TOOL]}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "tool"}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
    "/abort": {"request_id": "x"},
}


@pytest.mark.parametrize("path", POSTS)
async def test_odd_values_cause_no_server_error(make_client, path) -> None:
    """Sends each value in each field, then several accepted values at a time."""
    rng = random.Random(path)
    state = ServerState(scripted_text_engine("hello <tool_call>", chat_template=TEMPLATE))
    async with make_client(state=state) as client:

        async def is_accepted(changes: dict[str, Any]) -> bool:
            response = await client.post(path, content=json.dumps(GOOD[path] | changes))
            assert response.status_code < 500, changes
            assert ('"error":{"' in response.text) == (response.status_code >= 400), changes
            return response.status_code == 200

        accepted = [
            {name: value}
            for name in typing.get_type_hints(POSTS[path][0])
            for value in ODD
            if value is not None and await is_accepted({name: value})
        ]
        num_accepted = 0
        for _ in range(200):
            changes: dict[str, Any] = {}
            for change in rng.choices(accepted, k=rng.choice((2, 4, 8))):
                changes |= change
            num_accepted += await is_accepted(changes)
        assert num_accepted > 5
        assert await is_accepted({})

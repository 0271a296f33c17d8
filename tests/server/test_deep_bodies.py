"""Deeply nested values in any field of a request never cause a server error."""

import json

import pytest

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.state import ServerState

TEMPLATE = (
    "{# <tool_call> #}{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
)
MESSAGES = '"messages":[{"role":"user","content":"hi"}]'

# The path and the body of a request, by the place of the nested value, which replaces the @.
BODIES = {
    "response_format": ("/v1/chat/completions", "{" + MESSAGES + ',"response_format":@}'),
    "schema": (
        "/v1/chat/completions",
        "{"
        + MESSAGES
        + ',"response_format":{"type":"json_schema","json_schema":{"schema":{"not":@}}}}',
    ),
    "guided_json": ("/v1/completions", '{"prompt":"a","guided_json":@}'),
    "guided_json text": ("/v1/completions", '{"prompt":"a","guided_json":"@"}'),
    "prompt": ("/v1/completions", '{"prompt":[@]}'),
    "tool_choice": (
        "/v1/chat/completions",
        "{" + MESSAGES + ',"tools":[{"function":{"name":"f"}}],"tool_choice":@}',
    ),
    "tools": (
        "/v1/chat/completions",
        "{" + MESSAGES + ',"tools":[{"function":{"name":"f","parameters":@}}]}',
    ),
    "required": (
        "/v1/chat/completions",
        "{"
        + MESSAGES
        + ',"tools":[{"function":{"name":"f","parameters":@}}],"tool_choice":"required"}',
    ),
    "message": ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a","x":@}]}'),
    "content": ("/v1/chat/completions", '{"messages":[{"role":"user","content":[@]}]}'),
    "arguments": (
        "/v1/chat/completions",
        '{"messages":[{"role":"assistant","tool_calls":'
        '[{"function":{"name":"f","arguments":"@"}}]}]}',
    ),
    "template": ("/v1/chat/completions", "{" + MESSAGES + ',"chat_template_kwargs":{"x":@}}'),
    "input": ("/v1/responses", '{"input":[@]}'),
    "metadata": ("/v1/responses", '{"input":"a","metadata":{"x":@}}'),
    "responses tools": (
        "/v1/responses",
        '{"input":"a","tools":[{"type":"function","name":"f","parameters":@}]}',
    ),
    "format": ("/v1/responses", '{"input":"a","text":{"format":@}}'),
}


@pytest.mark.parametrize("name", BODIES)
async def test_deeply_nested_values_cause_no_server_error(make_client, name) -> None:
    path, body = BODIES[name]
    state = ServerState(scripted_text_engine("hello", chat_template=TEMPLATE))
    async with make_client(state=state) as client:
        for depth in (500, 900, 960, 975, 985, 990, 995, 5000):
            value = '{"a":' * depth + "1" + "}" * depth
            if '"@"' in body:
                value = json.dumps(value)[1:-1]
            response = await client.post(path, content=body.replace("@", value))
            assert response.status_code < 500, depth
        good = {"prompt": "hello"}
        assert (await client.post("/v1/completions", json=good)).status_code == 200

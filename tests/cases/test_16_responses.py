"""Failures that clients of /v1/responses have reported of other servers."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.testing.scripted_checkpoint import HISTORY_TEMPLATE

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files__",
    "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS}, {"type": "custom"}],
}
PLAIN_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {}}], ""),
        ([{"type": "compaction", "encrypted_content": "x"}], ""),
        ([{"type": "tool_search_call", "call_id": "c", "arguments": {}}], ""),
        ([{"type": "ghost_snapshot", "ghost_commit": {}}], ""),
        ([{"type": "of_next_year", "id": "x"}], ""),
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** X"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            ],
            "[assistant:<c patch input=*** X>][tool:done]",
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
            ],
            "[assistant:<c local_shell command=['ls']>][tool:a.py]",
        ),
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
            ],
            '[assistant:<c shell commands=[\'ls\']>][tool:[{"stdout": "a"}]]',
        ),
        (
            [{"type": "mcp_call", "id": "m", "name": "f", "arguments": '{"a": 1}', "output": "x"}],
            "[assistant:<m f a=1>][tool:x]",
        ),
        (
            [
                {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
                | {"namespace": "mcp__files__"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "[assistant:<c mcp__files__read>][tool:x]",
        ),
    ],
)
def test_pub_09_items_of_other_tools_are_skipped_or_shown(
    server, set_templates, items, text
) -> None:
    set_templates(HISTORY_TEMPLATE)
    around = [message("developer", "be brief"), message("user", "hi")]
    assert server.shown_input([*around, *items]) == f"[system:be brief][user:hi]{text}"


def test_pub_09_items_and_namespaces_add_functions(server, set_templates) -> None:
    set_templates(HISTORY_TEMPLATE)
    adding = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, PLAIN_TOOL]}
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    first = "[tools mcp__files__read f ][user:hi]"
    user = message("user", "hi")
    assert server.shown_input([adding, user], tools=hosted) == first
    assert server.shown_input([user], tools=[NAMESPACE, PLAIN_TOOL, *hosted]) == first
    assert server.shown_input([adding, user], tools=[PLAIN_TOOL]) == first


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "read"}])
def test_pub_09_a_call_carries_its_namespace(server, set_templates, choice) -> None:
    set_templates(HISTORY_TEMPLATE)
    body = {"input": "hi", "tools": [NAMESPACE], "tool_choice": choice, "max_output_tokens": 90}

    def completed(create: Callable[[], Any]) -> Any:
        """Drawn arguments may have more white space than fits; then they are drawn again."""
        replies = (create() for _ in range(20))
        return next(reply for reply in replies if reply.status == "completed")

    with server.openai() as client:
        create = functools.partial(client.responses.create, model="rand", **body)
        whole = completed(create)
        streamed = completed(lambda: [*create(stream=True)][-1].response)
    for reply in (whole, streamed):
        (one,) = reply.output
        assert (one.type, one.name, one.namespace) == ("function_call", "read", "mcp__files__")
        assert json.loads(one.arguments)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/responses/input_tokens", "nothing at /v1/responses/input_tokens"),
        ("/v1/responses/compact", "nothing at /v1/responses/compact"),
        ("/v1/responses/x/y/z", "nothing at /v1/responses/x/y/z"),
        ("/v1/responses/resp_1/cancel", "stores no responses"),
    ],
)
def test_pub_44_only_stored_responses_are_said_to_be_missing(server, path, message) -> None:
    error = server.refused(path, {}, status=404)
    assert message in error["message"]


def test_pub_44_a_stored_response_cannot_be_read_or_deleted(server) -> None:
    with server.openai() as client:
        for function in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(Exception, match="stores no responses"):
                function("resp_1")
        with pytest.raises(Exception, match="stores no responses"):
            client.responses.input_items.list("resp_1")

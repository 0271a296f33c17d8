"""Forced tool calls with a template that cannot show tools."""

import json

import pytest

from jaxserve.testing.api_client import CHAT
from jaxserve.testing.scripted_checkpoint import CONTENT_TEMPLATE

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_need_no_template_for_tools(server, set_templates, choice, parallel) -> None:
    set_templates(CONTENT_TEMPLATE, parser=None)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 30,
        "temperature": 1,
    }
    for seed in range(5):
        reply = server.post(CHAT, {**body, "seed": seed})
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()["choices"]
        assert not answer["message"]["content"]
        for one in answer["message"].get("tool_calls", []):
            assert one["function"]["name"] == "f"
            if answer["finish_reason"] == "tool_calls":
                assert json.loads(one["function"]["arguments"]) in ({"a": 1}, {"a": 2})
        assert answer["finish_reason"] in ("tool_calls", "length")
    error = server.refused(CHAT, {**body, "tool_choice": "auto"})
    assert "tool_choice 'required' or 'none'" in error["message"]


def test_the_tools_are_shown_if_the_template_cannot_show_them(server, set_templates) -> None:
    roles = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    set_templates(roles, parser=None)
    small = {"type": "function", "function": {"name": "f"}}
    user = {"role": "user", "content": "hi"}
    named = "Call this function. Answer with the JSON object of its arguments."
    shape = '{"name": "f"}'
    for system in ([], [{"role": "system", "content": "be brief"}]):
        text = server.shown_chat([*system, user], tools=[small], tool_choice=NAMED)
        if system:
            assert text == f"[system:be brief\n\n{named}\n{shape}][user:hi]"
        else:
            assert text == f"[user:{named}\n{shape}\n\nhi]"
    assert server.shown_chat([user], tools=[small], tool_choice="none") == "[user:hi]"
    set_templates("{{ tools | length }}" + roles, parser=None)
    assert server.shown_chat([user], tools=[small], tool_choice=NAMED) == "1[user:hi]"
